"""What counts as a pixel, and which band is which, is the same from training to the map."""

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import rasterio
from mpi4py import MPI
from test_same_as_whole_image import (
    LR,
    SEED,
    STEPS,
    differences,
    options_of,
    outcome_of,
    run_file,
    scenes_of,
    wanted_of,
)
from unlike_scenes import write
from whole_image import Scene, random_scene
from whole_recipe import train_whole

from tilenet.data.collars import share_collars
from tilenet.data.rasters import collar as collar_module
from tilenet.data.rasters.raster import Raster
from tilenet.errors import AgreedError
from tilenet.mapping.predict import predict
from tilenet.mapping.prediction import Prediction
from tilenet.training.config.keys import NetworkKeys

pytestmark = pytest.mark.ranks(1, 2)

NETWORK = NetworkKeys(poolings=2, base=4)
GRID = {"driver": "GTiff", "crs": "EPSG:32630"}
GRID["transform"] = rasterio.Affine(2, 0.1, 5e5, 0.1, -2, 4e6)


def name_bands(path: Path, *names: str) -> None:
    with rasterio.open(path, "r+") as file:
        file.descriptions = names


def stacked(folder: Path, scene: Scene, order: str, tag: str) -> str:
    """The scene's bands as single files in another order, each with its name; joined."""
    paths = [folder / f"{tag}-{number}.tif" for number in range(3)]
    if MPI.COMM_WORLD.rank == 0:
        for path, name in zip(paths, order.split(), strict=True):
            place = ("red", "green", "blue").index(name)
            write(path, scene.pixels[place : place + 1], nodata=0, **GRID)
            name_bands(path, name)
    MPI.COMM_WORLD.Barrier()
    return "+".join(map(str, paths))


@pytest.mark.ranks(2, 3)
def test_a_stack_with_named_bands_trains_and_maps_as_the_image_that_it_is(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    scenes = scenes_of(shared_path, [(75, 90)] * 2, comm)
    images = [
        stacked(shared_path, scenes[0], "blue red green", "a"),
        stacked(shared_path, scenes[1], "red blue green", "b"),
    ]
    run = run_file(shared_path, scenes, NETWORK, bands=["Red", "green", "BLUE"])
    other = stacked(shared_path, scenes[0], "green blue red", "c")
    found = outcome_of(replace(run, images=images), comm, other, 32)  # type: ignore[arg-type]
    wanted = wanted_of(scenes, NETWORK)
    loss, weight, logit = differences(found, wanted, scenes[0].valid)
    assert max(loss, weight, logit) < 1e-12
    entry = json.loads((Path(run.output) / "last" / "network.json").read_text())
    assert (entry["bands"], entry["band_names"]) == ([2, 3, 1], ["Red", "green", "BLUE"])

    # Where another file calls them otherwise, they can be said.
    if comm.rank == 0:
        write(shared_path / "plain.tif", scenes[0].pixels[[1, 2, 0]], nodata=0, **GRID)
        name_bands(shared_path / "plain.tif", "b1", "b2", "b3")
    comm.Barrier()
    again = Prediction(
        run.output, str(shared_path / "plain.tif"), str(shared_path / "m.tif"), "logits", 32
    )
    with pytest.raises(AgreedError, match=r"bands: Red, .* has 1 b1, 2 b2, 3 b3"):
        predict(again, comm)
    with pytest.raises(AgreedError, match=r"trained on: 3, bands: 2"):
        predict(replace(again, bands=("b3", 1)), comm)
    predict(replace(again, bands=("b3", 1, "B2")), comm)
    with rasterio.open(shared_path / "m.tif") as file:
        assert np.array_equal(file.read(), found.logits, equal_nan=True)


def collared(folder: Path, *, save: bool) -> Scene:
    """A scene whose upper left is black, and a lake."""
    scene = random_scene(folder, (75, 90), 3, write=save)
    row, col = np.ogrid[:75, :90]
    pixels = scene.pixels.copy()
    pixels[:, pixels.max(axis=0) == 0] = 5
    collar = row + 2 * col < 60
    pixels[:, collar] = 0
    pixels[:, 40:50, 50:70] = 0
    if save:
        write(scene.image, pixels, **GRID)
    return replace(scene, pixels=pixels, valid=~collar)


def test_a_collar_counts_nowhere_and_dark_water_everywhere(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collar_module, "STRIP_ROWS", 9)
    scene = collared(shared_path, save=comm.rank == 0)
    comm.Barrier()
    run = run_file(shared_path, [scene], NETWORK, nodata="collar")
    found = outcome_of(run, comm, scene.image, 32)
    wanted = train_whole([scene], options_of(NETWORK), STEPS, LR, SEED)
    assert max(differences(found, wanted, scene.valid)) < 1e-12
    assert np.isfinite(found.logits[:, 40:50, 50:70]).all()


@pytest.mark.ranks(1, 4)
def test_ranks_share_the_strips_and_find_the_same_collar(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collar_module, "STRIP_ROWS", 9)
    scene = collared(shared_path, save=comm.rank == 0)
    comm.Barrier()
    with Raster(str(scene.image), nodata="collar") as image:
        looked, own = [], image.collar_runs
        monkeypatch.setattr(
            image, "collar_runs", lambda s, *more: looked.append(s.row) or own(s, *more)
        )
        share_collars([image], comm)
        assert sorted(chain(*comm.allgather(looked))) == list(range(0, 75, 9))
        found = image.read(image.whole).valid
        assert np.array_equal(found, scene.valid)
        assert len(looked) <= -(-9 // comm.size), "no strip was looked at again"


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32", "float64"])
def test_the_dtype_of_the_same_numbers_changes_no_bit(
    comm: MPI.Intracomm, shared_path: Path, dtype: str
) -> None:
    (scene,) = scenes_of(shared_path, [(44, 52)], comm)
    pixels = np.where(scene.valid, scene.pixels % 250 + 1, 0)
    paths = {name: shared_path / f"{name}.tif" for name in sorted({dtype, "int32"})}
    if comm.rank == 0:
        for name, path in paths.items():
            write(path, pixels.astype(name), nodata=0, **GRID)
    comm.Barrier()
    outcomes = {}
    for name, path in paths.items():
        run = run_file(shared_path, [scene], NETWORK)
        run = replace(run, images=str(path), labels=str(scene.labels), steps=2)
        outcomes[name] = outcome_of(run, comm, path, 32)
    found, wanted = outcomes[dtype], outcomes["int32"]
    assert found.losses == wanted.losses
    assert np.array_equal(found.logits, wanted.logits, equal_nan=True)
    assert np.isnan(found.logits[:, ~scene.valid]).all()
    assert np.ptp(found.logits[:, scene.valid]) > 0
