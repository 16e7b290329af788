"""Training on polygons in another CRS: the numbers are those of the pixels that they cover."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyogrio
import pytest
import rasterio
import shapely
from mpi4py import MPI
from rasterio.features import rasterize
from rasterio.warp import transform
from test_bad_input import training
from test_same_as_whole_image import (
    LR,
    NETWORKS,
    SEED,
    STEPS,
    check_same,
    options_of,
    outcome_of,
    scenes_of,
)
from test_same_as_whole_image import run_file as run_of
from whole_image import Scene, random_scene
from whole_recipe import train_whole

from tilenet.__main__ import main
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.errors import AgreedError
from tilenet.library.whole_run import train
from tilenet.training.config.keys import TileKeys

pytestmark = pytest.mark.ranks(2)


def drawn_scene(folder: Path, size: tuple[int, int], *, write: bool, seed: int = 1) -> Scene:
    """A random scene whose labels are triangles in a GeoPackage in degrees."""
    scene = random_scene(folder, size, seed, write=write)
    rng = np.random.default_rng(seed + 1)
    grid = rasterio.Affine(2, 0.1, 5e5, 0.1, -2, 4e6)
    middles = rng.uniform(0, 1, (40, 1, 2)) * size[::-1]
    corners = middles + rng.uniform(-30, 30, (40, 3, 2))
    shapes = shapely.polygons(np.stack(grid @ tuple(np.moveaxis(corners, -1, 0)), axis=-1))
    kinds = rng.choice(["road", "house", "unknown"], 40)
    path = folder / f"labels{seed}.gpkg"
    if write:
        degrees = shapely.transform(
            shapes, lambda xy: np.column_stack(transform("EPSG:32630", "EPSG:4326", *xy.T))
        )
        columns = {"field_data": [kinds.astype(object)], "fields": ["kind"]}
        options = {"crs": "EPSG:4326", "geometry_type": "Polygon"}
        pyogrio.raw.write(path, shapely.to_wkb(degrees), **columns, **options)
    numbers = {"road": 1, "house": 2, "unknown": 255}
    order = np.argsort(kinds == "house", kind="stable")
    pairs = [(shapes[n], numbers[str(kinds[n])]) for n in order]
    classes = rasterize(pairs, size, transform=grid, dtype="int32").astype(np.int64)
    return Scene(scene.image, path, scene.pixels, scene.valid, classes)


KEYS = VectorKeys("kind", {"road": 1, "house": 2, "unknown": None}, priority=[2])


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("tiles", [None, (3, 2)], ids=str)
def test_losses_weights_and_logits_are_those_of_burned_labels(
    comm: MPI.Intracomm, shared_path: Path, tiles: tuple[int, int] | None
) -> None:
    scene = drawn_scene(shared_path, (157, 211), write=comm.rank == 0)
    comm.Barrier()
    assert all((scene.classes == label).sum() > 500 for label in (0, 1, 2, 255))
    keys = NETWORKS["same-bilinear"]
    run = run_of(
        shared_path, [scene], keys, vectors=KEYS, tiles=TileKeys(*tiles) if tiles else TileKeys()
    )
    wanted = train_whole([scene], options_of(keys), STEPS, LR, SEED)
    found = outcome_of(run, comm, scene.image, 64)
    check_same(comm, found, wanted, scene.valid)


def test_polygons_are_burned_as_the_run_began(comm: MPI.Intracomm, shared_path: Path) -> None:
    scene = drawn_scene(shared_path, (70, 90), write=comm.rank == 0)
    comm.Barrier()
    run = run_of(shared_path, [scene], NETWORKS["valid"], vectors=KEYS)
    assert train(replace(run, steps=1), comm=comm) == 0
    for change, said in (
        ({"vectors": replace(KEYS, background="ignore")}, r"vectors.background of .*: 0, .*: ign"),
        ({"vectors": replace(KEYS, priority=[1])}, r"vectors.priority of .*: \[2\], .*: \[1\]\)"),
        ({"ignore_index": 77}, "ignore_index of .*: 255, of the run file: 77"),
    ):
        with pytest.raises(AgreedError, match=said):
            train(replace(run, **change), resume=True, comm=comm)
    assert train(run, resume=True, comm=comm) == 0


def test_that_labels_are_resampled_is_said_once(
    comm: MPI.Intracomm, shared_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (scene,) = scenes_of(shared_path, [(70, 90)], comm)
    labels = shared_path / "moved.tif"
    if comm.rank == 0:
        with rasterio.open(scene.labels) as file:
            profile, values = file.profile, file.read()
        profile["transform"] @= rasterio.Affine.translation(4, -3)
        with rasterio.open(labels, "w", **profile) as file:
            file.write(values)
    comm.Barrier()
    assert main(training(shared_path, str(scene.image), str(labels), "--crop_px", "32")) == 0
    said = "".join(comm.allgather(capfd.readouterr().err))
    assert said.count("moved.tif lie on another grid than the image") == 1


def test_what_has_no_class_is_said_once_by_all(
    comm: MPI.Intracomm, shared_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scene = drawn_scene(shared_path, (70, 90), write=comm.rank == 0)
    comm.Barrier()
    vectors = "--vectors.field", "kind", "--vectors.classes", '{"road": 1}'
    assert main(training(shared_path, str(scene.image), str(scene.labels), *vectors)) == 1
    said = "".join(comm.allgather(capfd.readouterr().err))
    assert re.search(r"must stand under vectors.classes \(.*kind: house, unknown\); add it", said)
    assert said.count("tilenet: ") == 1
    assert not (shared_path / "run" / "history.csv").exists()
