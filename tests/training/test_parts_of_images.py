"""A part of an image is the image: training on it is training on the raster that holds no more."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from left_by_runs import check_bits, rows
from mpi4py import MPI
from rasterio.windows import Window as FileWindow
from test_same_as_whole_image import NETWORKS, run_file, scenes_of
from test_vector_training import KEYS, drawn_scene
from whole_image import random_scene

from tilenet.__main__ import main
from tilenet.data.labels.open import open_labels
from tilenet.data.rasters.raster import Raster
from tilenet.errors import AgreedError, TilenetError
from tilenet.geometry.windows import Part
from tilenet.library.whole_run import train
from tilenet.training.config.keys import AugmentKeys, TileKeys
from tilenet.training.config.read import read_run_file
from tilenet.training.config.run_file import RunFile
from tilenet.training.config.validation_keys import ValidationKeys

pytestmark = pytest.mark.ranks(1, 2)

SIZE = (157, 211)
GRID = rasterio.Affine(2, 0.1, 5e5, 0.1, -2, 4e6)  # of `random_scene`
PART = (21, 35, 102, 119)  # row, column, height and width

WAYS: dict[str, dict[str, Any]] = {
    "tiles": {"tiles": TileKeys(2, 3)},
    "crops": {
        "crop_px": 32,
        "oversample": 0.5,
        "class_weights": "auto",
        "augment": AugmentKeys(True, True),
    },
    "collar": {"nodata": "collar"},
    "coarse": {"resolution": 2 * float(np.hypot(2, 0.1))},
    "held out": {"crop_px": 32, "validation": ValidationKeys(share=0.2, block_px=48)},
}


def cut(path: Path, part: tuple[int, ...], factor: int = 1) -> Path:
    """A raster of that part alone, as rasterio writes it."""
    row, col, height, width = (number * factor for number in part)
    made = path.with_name(f"cut-{path.name}")
    with rasterio.open(path) as file:
        window = FileWindow(col, row, min(width, file.width - col), min(height, file.height - row))
        profile = {**file.profile, "height": window.height, "width": window.width}
        profile["transform"] = file.window_transform(window)
        with rasterio.open(made, "w", **profile) as other:
            other.write(file.read(window=window))
    return made


def blacken(path: Path) -> None:
    """Black water that reaches the part's edges, and not those of the image."""
    with rasterio.open(path, "r+") as file:
        pixels = file.read()
        pixels[:, 40:70, 20:60] = 0
        pixels[:, 100:140, 130:160] = 0
        file.write(pixels)


def same(first: RunFile, second: RunFile) -> None:
    check_bits(first, second)
    if first.validation.holds_out:
        scores = [
            [{**row, "seconds": ""} for row in rows(run, "validation.csv")]
            for run in (first, second)
        ]
        assert scores[0] == scores[1]
        assert len(scores[0]) > 0


@pytest.mark.parametrize(
    ("way", "labels"),
    [
        ("tiles", "finer"),
        ("crops", "pixels"),
        ("crops", "polygons"),
        ("collar", "polygons"),
        ("coarse", "pixels"),
        ("coarse", "finer"),
        ("held out", "polygons"),
        ("held out", "finer"),
    ],
)
def test_training_on_a_part_is_training_on_the_raster_cut_to_it(
    comm: MPI.Intracomm, shared_path: Path, way: str, labels: str
) -> None:
    write, keys = comm.rank == 0, dict(WAYS[way])
    make = drawn_scene if labels == "polygons" else random_scene
    scene = make(shared_path, SIZE, seed=1, write=write)
    whole = run_file(shared_path, [scene], NETWORKS["same-bilinear"])
    factor = 2 if way == "coarse" else 1
    window = tuple(number // factor for number in PART)
    if write:
        blacken(scene.image)
        if labels == "finer":
            finer(scene.labels)
        cut(scene.image, window, factor)
        if labels != "polygons":
            cut(scene.labels, window, factor * (3 if labels == "finer" else 1))
    comm.Barrier()
    if labels == "polygons":
        keys["vectors"] = KEYS
    whole = replace(whole, steps=3, **keys)
    image, truth = (path.with_name(f"cut-{path.name}") for path in (scene.image, scene.labels))
    truth = scene.labels if labels == "polygons" else truth
    alone = replace(whole, images=str(image), labels=str(truth), output=str(shared_path / "alone"))
    assert train(alone, comm=comm) == 0
    part = replace(whole, window=",".join(str(number) for number in window))
    assert train(part, comm=comm) == 0
    same(part, alone)


def finer(path: Path) -> None:
    """Three times as many label pixels along a side, of which some differ from their neighbours."""
    with rasterio.open(path) as file:
        classes, profile = file.read(), dict(file.profile)
    fine = classes.repeat(3, axis=1).repeat(3, axis=2)
    rng = np.random.default_rng(5)
    some = rng.random(fine.shape) < 0.3
    fine[some] = rng.integers(0, 3, int(some.sum()))
    profile |= {"height": fine.shape[1], "width": fine.shape[2]}
    profile["transform"] = profile["transform"] @ rasterio.Affine.scale(1 / 3)
    path.unlink()
    with rasterio.open(path, "w", **profile) as file:
        file.write(fine)


@pytest.mark.ranks(2)
def test_a_bbox_is_that_part_of_each_image(comm: MPI.Intracomm, shared_path: Path) -> None:
    """Of images that lie shifted against one another, so that their parts differ."""
    scenes = scenes_of(shared_path, [SIZE] * 3, comm)
    shifts = [(0, 0), (17, -9), (-30, 21)]
    if comm.rank == 0:
        for scene, (row, col) in zip(scenes, shifts, strict=True):
            for path in (scene.image, scene.labels):
                with rasterio.open(path, "r+") as file:
                    file.transform = GRID @ rasterio.Affine.translation(-col, -row)
    comm.Barrier()
    xs, ys = zip(*(GRID @ corner for corner in ((70.4, 50.4), (120.6, 90.6))), strict=True)
    bbox = [min(xs), min(ys), max(xs), max(ys)]
    run = run_file(shared_path, scenes[:2], NETWORKS["same-bilinear"])
    run = replace(run, steps=2, crop_px=32, bbox=bbox)
    held = ValidationKeys(str(scenes[2].image), str(scenes[2].labels), every=1)
    run = replace(run, validation=held)
    parts = []
    for scene in scenes:
        with Raster(str(scene.image), part=Part(bbox=tuple(bbox))) as image:
            assert image.part is not None
            parts.append(image.part)
    assert len({(p.row, p.col) for p in parts}) == 3
    comm.Barrier()
    if comm.rank == 0:
        for scene, part in zip(scenes, parts, strict=True):
            for path in (scene.image, scene.labels):
                cut(path, (part.row, part.col, part.height, part.width))
    comm.Barrier()
    names = [[str(p.with_name(f"cut-{p.name}")) for p in (s.image, s.labels)] for s in scenes]
    alone = replace(
        run,
        bbox=None,
        images=[image for image, _ in names[:2]],
        labels=[labels for _, labels in names[:2]],
        validation=replace(held, images=names[2][0], labels=names[2][1]),
        output=str(shared_path / "alone"),
    )
    assert train(run, comm=comm) == 0
    assert train(alone, comm=comm) == 0
    same(run, alone)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"bbox": [0, 0, 1, 1]}, r"a bbox must touch the image \(bbox: 0,0,1,1, .*image1.tif: "),
        ({"bbox": [1, 0, 1, 1]}, r"a bbox needs XMIN below XMAX"),
        ({"window": [100, 0, 58, 10]}, r"inside .*: 100,0,58,10, .*image1.tif: 157 × 211 px"),
        ({"window": [1, 1, 0, 5]}, r"a window has pixels and lies inside"),
    ],
)
def test_a_part_that_is_none_of_the_image_is_refused(
    comm: MPI.Intracomm, shared_path: Path, keys: dict[str, Any], said: str
) -> None:
    run = run_file(
        shared_path, scenes_of(shared_path, [SIZE], comm), NETWORKS["same-bilinear"], **keys
    )
    with pytest.raises(AgreedError, match=said):
        train(run, comm=comm)


def test_a_window_is_of_one_image(comm: MPI.Intracomm, shared_path: Path) -> None:
    scenes = scenes_of(shared_path, [(60, 70)] * 2, comm)
    run = run_file(shared_path, scenes, NETWORKS["same-bilinear"], window=[0, 0, 50, 50])
    with pytest.raises(AgreedError, match="window is rows and columns of one image"):
        train(run, comm=comm)
    held = ValidationKeys(str(scenes[1].image), str(scenes[1].labels))
    alone = replace(run, images=run.images[:1], labels=list(run.label_paths[:1]), validation=held)
    with pytest.raises(AgreedError, match=r"one image \(images: 1, for validation: 1\)"):
        train(replace(alone, batch_size=1), comm=comm)


def test_a_run_goes_on_with_the_part_that_it_began_with(
    comm: MPI.Intracomm, shared_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_file(
        shared_path,
        scenes_of(shared_path, [SIZE], comm),
        NETWORKS["same-bilinear"],
        window=list(PART),
    )
    run = replace(run, steps=2)
    whole = replace(run, steps=4, output=str(shared_path / "whole"))
    assert train(run, comm=comm) == 0
    for other in ([22, *PART[1:]], None):
        with pytest.raises(AgreedError, match=r"part of .*: window 21,35,102,119, of the run file"):
            train(replace(run, steps=4, window=other), resume=True, comm=comm)
    said = replace(run, steps=4, window="21,35,102,119")
    assert train(said, resume=True, comm=comm) == 0
    assert train(whole, comm=comm) == 0
    same(said, whole)
    # what was found of one part is not taken for another's
    for window, words in (
        (whole.window, "places are those of"),
        ([22, *PART[1:]], "looked at again"),
    ):
        capfd.readouterr()
        assert train(replace(whole, window=window), overwrite=True, comm=comm) == 0
        assert words in "".join(comm.allgather(capfd.readouterr().err))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"bbox": [0, 0, 1, 1], "window": [0, 0, 1, 1]}, "is named once, by bbox or by window"),
        ({"bbox": [0, 0, 1]}, "bbox is four numbers, XMIN,YMIN,XMAX,YMAX"),
        ({"bbox": "0,0,1,x"}, "bbox is four numbers, XMIN,YMIN,XMAX,YMAX"),
        ({"window": "0,0,1,1.5"}, "window is four numbers, ROW,COL,HEIGHT,WIDTH"),
        ({"window": "9" * 5000 + ",0,1,1"}, "window is four numbers"),
    ],
)
@pytest.mark.ranks(1)
def test_keys_that_name_no_part_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(TilenetError, match=said):
        RunFile(images="a", labels="b", classes=2, output="c", steps=1, **keys)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("factor", [1, 2, 5])
def test_pixels_samples_and_labels_of_a_part_are_those_of_the_cut_file(
    comm: MPI.Intracomm, shared_path: Path, factor: int
) -> None:
    scene = drawn_scene(shared_path, SIZE, write=True)
    height, width = (-(-number // factor) for number in SIZE)
    window = (4, 7, height - 4, width - 9)  # to the lower edge, where a coarse pixel is cut off
    resolution = None if factor == 1 else factor * float(np.hypot(2, 0.1))
    made = cut(scene.image, window, factor)
    with (
        Raster(str(scene.image), None, resolution, part=Part(window=window)) as part,
        Raster(str(made), None, resolution) as alone,
        open_labels(str(scene.labels), part, 255, KEYS) as burned,
        open_labels(str(scene.labels), alone, 255, KEYS) as wanted,
    ):
        assert part.size == alone.size == window[2:]
        assert part.grid == alone.grid
        for name in ("read", "sample"):
            ours, theirs = getattr(part, name)(part.whole), getattr(alone, name)(alone.whole)
            assert np.array_equal(ours.values, theirs.values)
            assert np.array_equal(ours.valid, theirs.valid)
        labels = burned.read(part.whole)
        assert np.array_equal(labels, wanted.read(alone.whole))
        assert len(np.unique(labels)) == 4


@pytest.mark.ranks(1)
def test_numbers_are_given_as_predict_takes_them(
    comm: MPI.Intracomm, shared_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that begin with a minus sign, and again from the run file that is kept."""
    scene = random_scene(shared_path, SIZE, 1, write=True)
    output = shared_path / "run"
    words = ["train", "--images", str(scene.image), "--labels", str(scene.labels), "--classes"]
    words += ["3", "--steps", "0", "--output", str(output), "--device", "cpu"]
    words += ["--network.poolings", "1", "--network.base", "2"]
    assert main([*words, "--bbox", "-5.5,0,1,1"]) == 1
    assert "a bbox must touch the image (bbox: -5.5,0,1,1, " in capsys.readouterr().err
    for given in ("21,35,102,119", "[21, 35, 102, 119]"):
        assert main([*words, "--overwrite", "--window", given]) == 0
        kept = read_run_file(["-c", str(output / "run.yaml")])[0]
        assert kept.part == Part(window=PART)
