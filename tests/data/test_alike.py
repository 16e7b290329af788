"""Scale and offset tags: images of one network have the same, numbers of a regression get them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import rasterio
from rasterio import shutil as shutil_of_rasterio
from rasterio.enums import ColorInterp
from unlike_scenes import write

import tilenet
from tilenet.__main__ import main
from tilenet.data.labels.values import Values
from tilenet.data.rasters.raster import Raster

SIZE = 23, 31
GRID = {"driver": "GTiff", "crs": "EPSG:32630", "transform": rasterio.Affine(2, 0, 5e5, 0, -2, 4e6)}
RNG = np.random.default_rng(5)
PIXELS = RNG.integers(1, 999, (2, *SIZE)).astype(np.int16)
CLASSES = RNG.integers(0, 3, (1, *SIZE)).astype(np.uint8)


def raster(path: Path, values: np.ndarray, scale: float = 1.0, offset: float = 0.0) -> str:
    write(path, values, **GRID)
    if (scale, offset) != (1, 0):
        with rasterio.open(path, "r+") as file:
            # The last band only: the tags of each band count.
            file.scales = (1.0,) * (file.count - 1) + (scale,)
            file.offsets = (0.0,) * (file.count - 1) + (offset,)
    return str(path)


def train(folder: Path, images: list[str], *more: str) -> int:
    labels = raster(folder / "labels.tif", CLASSES)
    return main(
        [
            "train",
            *("--images", str(images), "--labels", str([labels] * len(images)), "--classes", "3"),
            *("--network.poolings", "1", "--network.base", "2", "--steps", "1", "--device", "cpu"),
            *("--output", str(folder / "run"), "--overwrite", *more),
        ]
    )


@pytest.mark.parametrize(
    ("scale", "offset", "code"),
    [(0.1, 0, 1), (1, 5, 1), (1, 0, 0), (0, 0, 0), (float("nan"), 0, 0), (1 + 1e-8, 0, 0)],
)
def test_images_of_a_run_have_one_scaling(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    scale: float,
    offset: float,
    code: int,
) -> None:
    plain = raster(tmp_path / "plain.tif", PIXELS)
    tagged = raster(tmp_path / "tagged.tif", PIXELS[::-1], scale, offset)
    assert train(tmp_path, [plain, tagged]) == code
    said = capfd.readouterr().err
    assert ("the same scale and offset tags" in said) == bool(code), said
    if code:
        assert f"band 2 of {tagged}: × {scale:g} +{offset:g}" in said
        assert train(tmp_path, [plain, tagged], "--bands", "[1]") == 0  # the tags of what is read
        assert train(tmp_path, [tagged]) == 0
        labels = str(tmp_path / "labels.tif")
        held = ("--validation.images", f"[{tagged}]", "--validation.labels", f"[{labels}]")
        assert train(tmp_path, [plain], *held) == 1


@pytest.mark.parametrize(
    ("first", "second", "chosen", "said"),
    [
        (
            ("red", "nir"),
            ("nir", "red"),
            None,
            "tif: nir, red); name the bands (bands: [red, nir])",
        ),
        (
            ("red", "nir"),
            ("NIR", "Red"),
            None,
            "tif: NIR, Red); name the bands (bands: [red, nir])",
        ),
        (("red", "nir"), ("nir", "red"), "[red,nir]", None),
        (("red", "nir"), ("nir", "red"), "[1,2]", None),
        (("red", "nir"), ("red", "nir"), None, None),
        (("red", "nir"), ("red", "swir"), None, None),
        (("red", ""), ("", "red"), None, None),
        (("red", "red"), ("red", "red"), None, None),
    ],
)
def test_images_of_a_run_name_their_bands_in_one_order(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    first: tuple[str, str],
    second: tuple[str, str],
    chosen: str | None,
    said: str | None,
) -> None:
    images = []
    for name, bands in (("a.tif", first), ("b.tif", second)):
        images.append(raster(tmp_path / name, PIXELS))
        with rasterio.open(images[-1], "r+") as file:
            file.descriptions = bands
    more = ("--bands", chosen) if chosen else ()
    assert train(tmp_path, images, *more) == (said is not None)
    assert said is None or said in capfd.readouterr().err


@pytest.mark.parametrize("name", ["", "nir"])
def test_alpha_and_numbers_of_other_types_are_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    plain = raster(tmp_path / "plain.tif", PIXELS[[0, 1, 1]])
    coloured = raster(tmp_path / "coloured.tif", (PIXELS[[0, 1, 1, 0]] // 4).astype(np.uint8))
    with rasterio.open(coloured, "r+") as file:
        file.colorinterp = [ColorInterp[n] for n in ("red", "green", "blue", "alpha")]
        file.descriptions = ("", "", "", name)
    assert train(tmp_path, [plain]) == 0
    assert "alpha" not in capfd.readouterr().err
    assert train(tmp_path, [plain, coloured]) == 0
    said = capfd.readouterr().err
    band = "band 4 (nir)" if name else "band 4"
    assert f"{band} of {coloured} is alpha by its colour, so pixels where it is 0" in said
    assert "and it is not read; if it is a band" in said
    assert f"whatever their type ({plain}: int16, {coloured}: uint8)" in said
    assert train(tmp_path, [coloured], "--bands", "[1,2,3,4]") == 0
    said = capfd.readouterr().err
    assert "is alpha" in said
    assert "not read" not in said


def test_an_image_to_map_names_its_bands_in_the_order_of_those_trained_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    images = []
    for name, bands in (("a.tif", ("red", "nir")), ("b.tif", ("NIR", "Red")), ("c.tif", ("", ""))):
        images.append(raster(tmp_path / name, PIXELS if name == "a.tif" else PIXELS[::-1]))
        with rasterio.open(images[-1], "r+") as file:
            file.descriptions = bands
    assert train(tmp_path, images[:1]) == 0

    def code(image: str, *more: str) -> int:
        command = ("predict", str(tmp_path / "run/last"), image, str(tmp_path / "map.tif"))
        return main([*command, "--device", "cpu", "--overwrite", *more])

    assert code(images[1]) == 1
    said = capfd.readouterr().err
    assert f"(trained on: red, nir, {images[1]}: NIR, Red); name the bands" in said
    maps = []
    for image, *more in ((images[0],), (images[2],), (images[1], "--bands", "red,nir")):
        assert code(image, *more) == 0
        with rasterio.open(tmp_path / "map.tif") as file:
            maps.append(file.read())
    np.testing.assert_array_equal(maps[2], maps[0])
    assert (maps[1] != maps[0]).any()
    # Runs that choose their bands find them by name, or by number in any image.
    for chosen in ("[red,nir]", "[1,2]"):
        assert train(tmp_path, images[:1], "--bands", chosen) == 0
        assert code(images[1]) == 0


def test_an_image_to_map_is_scaled_as_those_trained_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tagged = raster(tmp_path / "tagged.tif", PIXELS, 1e-4, -0.1)
    plain = raster(tmp_path / "plain.tif", PIXELS)
    assert train(tmp_path, [tagged]) == 0
    output = str(tmp_path / "map.tif")
    command = ["predict", str(tmp_path / "run/last"), plain, output, "--device", "cpu"]
    assert main(command) == 1
    assert "trained on: × 0.0001 -0.1, band 2" in capfd.readouterr().err
    assert main([*command[:2], tagged, *command[3:]]) == 0
    # Checkpoints of before say nothing of it.
    folder = tmp_path / "older"
    shutil.copytree(tmp_path / "run/last/", folder)
    entry = json.loads((folder / "network.json").read_text())
    assert entry.pop("scaling") == [[1, 0], [1e-4, -0.1]]
    (folder / "network.json").write_text(json.dumps(entry))
    (folder / "checksums.json").unlink()
    assert main(["predict", str(folder), plain, output, "--device", "cpu", "--overwrite"]) == 0


def test_numbers_of_a_regression_have_their_unit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stored = RNG.integers(-500, 500, (1, *SIZE)).astype(np.int16)
    image = raster(tmp_path / "image.tif", PIXELS)
    packed = raster(tmp_path / "packed.tif", stored, 0.01, 30)
    metres = raster(tmp_path / "metres.tif", stored * 0.01 + 30)
    with Raster(image) as opened, Values(packed, opened) as labels:
        assert "× 0.01 +30.0" in labels.facts  # another tag is another file to a run that goes on
        np.testing.assert_allclose(labels.targets(opened.whole), stored[0] * 0.01 + 30, 1e-15)
    for mapped, truth in ((packed, metres), (metres, packed)):
        assert main(["evaluate", mapped, truth, "--json"]) == 0
        scores = json.loads(capfd.readouterr().out)
        assert scores["rmse"] < 1e-12
        assert scores["r2"] > 1 - 1e-12


def test_info_says_that_pixels_are_read_as_stored(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tagged = raster(tmp_path / "tagged.tif", PIXELS, 1e-4, -0.1)
    assert main(["info", tagged]) == 0
    assert "read as stored: 2 (× 0.0001 -0.1)" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("tag", "more", "said"),
    [
        (-9999, (), "as in band 1 (-9999)"),
        (-9999, ("--bands", "[1]"), "as in band 1 (-9999)"),
        (-9999, ("--bands", "[2]"), ""),
        (-9999, ("--nodata", "none"), ""),
        (0, (), ""),
        (None, ("--nodata", "-9999"), "as in band 1 (-9999)"),
    ],
)
def test_that_nodata_counts_where_another_band_has_data_is_said_once(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    tag: float | None,
    more: tuple[str, ...],
    said: str,
) -> None:
    values = PIXELS.copy()
    values[0, 3:9, 4:7] = -9999 if tag is None else tag
    values[:, 20:] = -9999 if tag is None else tag
    path = tmp_path / "image.tif"
    write(path, values, **GRID, nodata=tag)
    for _ in range(2):  # from a survey that was kept too
        assert train(tmp_path, [str(path)], *more) == 0
        printed = capfd.readouterr().err
        assert printed.count("counts as a value") == bool(said), printed
        assert said in printed
    assert main(["info", str(path), "--pixels", "--bands", "1"]) == 0
    assert ("band 1 (-9999)" in capfd.readouterr().out) == (tag == -9999)


def test_an_image_to_map_has_the_bands_that_a_run_named_or_as_many(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    two = raster(tmp_path / "two.tif", PIXELS)
    three = raster(tmp_path / "three.tif", np.concatenate([PIXELS, PIXELS[:1]]))
    output, predict = str(tmp_path / "map.tif"), ["predict", str(tmp_path / "run/last")]
    rest = [output, "--device", "cpu", "--overwrite"]
    assert train(tmp_path, [two]) == 0
    assert main([*predict, three, *rest]) == 1
    assert "as many bands as it was trained on (trained on: 2, bands: 3)" in capfd.readouterr().err
    assert main([*predict, three, *rest, "--bands", "1,2"]) == 0
    assert train(tmp_path, [two], "--bands", "[2,1]") == 0
    assert main([*predict, three, *rest]) == 0
    assert main([*predict, two, *rest]) == 0


def test_a_map_does_not_replace_what_a_virtual_image_is_read_from(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    image, virtual = raster(tmp_path / "image.tif", PIXELS), str(tmp_path / "image.vrt")
    shutil_of_rasterio.copy(image, virtual, driver="VRT")
    assert train(tmp_path, [virtual]) == 0
    before = Path(image).read_bytes()
    assert main(["predict", str(tmp_path / "run"), virtual, image, "--overwrite"]) == 1
    assert "may not replace what its image is read from" in capfd.readouterr().err
    assert Path(image).read_bytes() == before


def test_an_array_is_mapped_as_stored(tmp_path: Path) -> None:
    tagged = raster(tmp_path / "tagged.tif", PIXELS, 1e-4, -0.1)
    assert train(tmp_path, [tagged]) == 0
    run = tilenet.Run(tmp_path / "run")
    found = tilenet.predict(run, PIXELS, output="logits")
    assert np.array_equal(found, tilenet.predict(run, tagged, output="logits"))
