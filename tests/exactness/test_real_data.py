"""Each image of the collection of real imagery: trained on and mapped, or refused with a reason.

What is expected is computed on the whole image, without tilenet (outside/real_images.py).
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import rasterio
from mpi4py import MPI
from outside.real_images import (
    CASES,
    arguments,
    check_logits,
    check_losses,
    image_name,
    logits_of,
    read_image,
)
from outside.rebuild import Image

from tilenet.__main__ import main

pytestmark = pytest.mark.real

UNLABELLED = {
    "umbra_mount_yasur_rotated.tif": ("sample_geotiff", ()),
    "rasterio_RGB.byte.tif": ("new_brunswick", ()),
    "pix4d_rgba_alpha.tif": ("new_brunswick", ()),
    "opengeos_naip5m_4band.tif": ("SN7", ()),
    "satsense_s2_4band_uint16.tif": ("SN7", ()),
    "santa_monica_2020_91.tif": ("SN7", ()),
    # whose fourth band has no name
    "claremont_2020_10.tif": ("SN_Vegas", ("--bands", "4,red,green,blue")),
}
Trained = Callable[[str], Path]


@pytest.fixture(scope="module")
def trained(real: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The run of two steps on an image; unless it has an `init`, with the first weights."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def run(name: str) -> Path:
        given = [*arguments(real, name, folder / name), "--steps", "2"]
        init = CASES[name].init
        if init:
            assert main([*given, "--init", str(run(init))]) == 0
        else:
            assert main([*given, "--steps", "0"]) == 0
            assert main([*given, "--resume"]) == 0
        return folder / name

    return run


@pytest.mark.parametrize("name", CASES)
def test_losses_and_logits_are_those_of_plain_torch_on_the_whole_image(
    real: Path, trained: Trained, tmp_path: Path, name: str
) -> None:
    case, run, path = CASES[name], trained(name), tmp_path / "map.tif"
    start = trained(case.init) / "last" if case.init else run / "checkpoints" / "step-00000000"
    check_losses(real, name, start, run)
    files = image_name(real, case.files)
    assert main(["predict", str(run), files, str(path), "--output", "logits"]) == 0
    check_logits(real, name, run, path)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "options", "of_map"),
    [
        ("new_brunswick", "--mesh.rows 2 --mesh.columns 1", "--tile 120"),
        ("custom_proj", "--halo_mode exchange", ""),
        ("SN7", "--tiles.rows 3 --tiles.columns 2", ""),
    ],
)
def test_over_two_ranks_they_are_the_same(
    comm: MPI.Intracomm, real: Path, shared_path: Path, name: str, options: str, of_map: str
) -> None:
    case, run, path = CASES[name], shared_path / "run", shared_path / "map.tif"
    given = [*arguments(real, name, run), *options.split()]
    assert main([*given, "--steps", "0"]) == 0
    assert main([*given, "--steps", "2", "--resume"]) == 0
    files = image_name(real, case.files)
    logits = ["predict", str(run), files, str(path), "--output", "logits", *of_map.split()]
    assert main(logits) == 0
    if comm.rank == 0:
        check_losses(real, name, run / "checkpoints" / "step-00000000", run)
        check_logits(real, name, run, path)


@pytest.mark.parametrize("name", UNLABELLED)
def test_maps_lie_on_the_pixels_of_their_images(
    real: Path, trained: Trained, tmp_path: Path, name: str
) -> None:
    """Whatever the grid is: turned, of pixels that are no squares, smaller than a halo."""
    network, options = UNLABELLED[name]
    image, grid = read_image(real, (name,), CASES[network].bands)
    check_class_map(real / name, trained(network), tmp_path / "map.tif", image, *options)
    if name.startswith("umbra"):
        assert grid.transform.b != 0
    if name.startswith("rasterio"):
        assert grid.transform.a != -grid.transform.e
    if name.startswith(("rasterio", "pix4d", "satsense")):
        assert 0 < image.valid.mean() < 1


def test_a_map_has_the_collar_of_its_image(real: Path, trained: Trained, tmp_path: Path) -> None:
    path = real / "rasterio_RGB.byte.tif"
    image, _ = read_image(real, (path.name,))
    black = ~image.pixels.any(axis=0)
    grown = np.pad(np.zeros_like(black), 1, constant_values=True)
    inside, before = grown[1:-1, 1:-1], -1
    while before != (before := int(inside.sum())):
        near = grown[:-2, 1:-1] | grown[2:, 1:-1] | grown[1:-1, :-2] | grown[1:-1, 2:]
        inside |= black & near
    assert (inside != ~image.valid).any(), "the tag must say something else"
    collared = Image(image.pixels, ~inside)
    run = trained("new_brunswick")
    check_class_map(path, run, tmp_path / "map.tif", collared, "--nodata", "collar")


def check_class_map(source: Path, run: Path, path: Path, image: Image, *more: str) -> None:
    """A map's place, nodata and classes."""
    assert main(["predict", str(run), str(source), str(path), *more]) == 0
    with rasterio.open(path) as file, rasterio.open(source) as original:
        assert file.shape == original.shape
        assert file.transform == original.transform
        assert file.crs == original.crs
        assert np.array_equal(file.dataset_mask() != 0, image.valid)
        found = file.read(1)
    wanted = logits_of(run, image)
    assert np.array_equal(found[image.valid], wanted.argmax(axis=0)[image.valid])
    assert len(np.unique(found[image.valid])) >= 2, "one class proves little"


@pytest.mark.parametrize(
    ("image", "labels", "said"),
    [
        ("santa_monica_2020_91.tif", "santa_monica_2020_91.json", "buffer"),
        ("claremont_2020_10.tif", "claremont_2020_10.json", "buffer"),
        (
            "sample_geotiff_custom_proj.tif",
            "geotiff_custom_proj_labels.geojson",
            "without a CRS is in degrees",
        ),
        ("new_brunswick_2of2.tif", "massachusetts_23429155_15.gpkg", "must overlap their image"),
        ("sample_geotiff.tif", "SN_Vegas_WV03.gpkg", "must overlap their image"),
        (
            "santa_monica_2020_91.tif+claremont_2020_10.tif",
            "SN_Vegas_WV03.gpkg",
            "stacked files must overlap",
        ),
        ("umbra_mount_yasur_rotated.tif", "fair_uganda_z21_buildings.tif", "overlap"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(
    real: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    image: str,
    labels: str,
    said: str,
) -> None:
    check_refused(image_name(real, tuple(image.split("+"))), real / labels, tmp_path, said, capfd)


def test_complex_pixels_are_refused(
    real: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As radar delivers them, made here of a satellite image."""
    path, labels = tmp_path / "radar.tif", tmp_path / "labels.tif"
    with rasterio.open(real / "satsense_s2_4band_uint16.tif") as file:
        values, profile = file.read(), file.profile
    profile |= {"count": 1, "nodata": None}
    with rasterio.open(path, "w", **(profile | {"dtype": "complex64"})) as file:
        file.write((values[0] + 1j * values[1]).astype(np.complex64), 1)
    with rasterio.open(labels, "w", **(profile | {"dtype": "uint8"})) as file:
        file.write((values[2] > np.median(values[2])).astype(np.uint8), 1)
    check_refused(str(path), labels, tmp_path, "must be real numbers", capfd)


def check_refused(
    image: str, labels: Path, folder: Path, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one sentence, and nothing is left behind."""
    run = folder / "run"
    given = ["--images", image, "--labels", str(labels), "--classes", "2", "--steps", "1"]
    assert main(["train", *given, "--device", "cpu", "--output", str(run)]) == 1
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tilenet: ")]
    assert len(lines) == 1, lines
    assert said in lines[0]
    assert not run.exists()
