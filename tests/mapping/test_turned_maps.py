"""Means over turned images: those that plain torch makes of the whole image, whatever the tiles."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from mpi4py import MPI
from test_map_parts import ask, interrupt
from test_predict_norms import OPTIONS, Trained, scene_of, trained, worst
from test_swept_maps import adopted
from whole_image import Scene, extended, standardised
from zoo import network

import tilenet
from tilenet.errors import TilenetError
from tilenet.geometry.halo import context_of
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.symmetries import SYMMETRIES, symmetries
from tilenet.geometry.tiles import Cut, cut, turned_tiling
from tilenet.geometry.windows import Window, overlap
from tilenet.mapping.mapper import Mapper
from tilenet.mapping.predict import predict
from tilenet.mapping.prediction import Prediction

SIZE = 93, 118  # rows and columns that no stride divides


def mean_of_turns(made: Trained, scene: Scene, tta: str, unit: int | None = None) -> np.ndarray:
    """Of probabilities, each image turned in memory, extended and mapped as a whole."""
    image, found = standardised(scene), []
    for symmetry in symmetries(flips=True, rotations=tta == "all"):
        turned = np.ascontiguousarray(symmetry.turn(image))
        height, width = turned.shape[1:]
        if unit is None:
            inputs = extended(turned, made.options)
        else:
            edges = [(0, 0), (0, -height % unit), (0, -width % unit)]
            inputs = torch.from_numpy(np.pad(turned, edges, mode="reflect"))[None]
        with torch.no_grad():
            scores = made.network(inputs)[0, :, :height, :width].softmax(0).numpy()
        found.append(symmetry.back.turn(scores))
    return np.mean(found, axis=0)


def turned_map(
    made: Trained, scene: Scene, comm: MPI.Intracomm, tta: Any, **more: Any
) -> tuple[np.ndarray, dict[str, Any]]:
    """Probabilities on all ranks, and what `predict` says of them."""
    out = str(made.folder / "map.tif")
    how = {"output": "probabilities", "device": "cpu", "tta": tta, **more}
    done = predict(Prediction(str(made.folder), str(scene.image), out, overwrite=True, **how), comm)
    with rasterio.open(out) as file:
        found = file.read()
    comm.Barrier()
    return found, done


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(
    ("tta", "norm", "tile_px", "method"),
    [
        ("all", "batch", 28, "tiles"),
        ("flips", "group", 40, "passes"),
        ("all", "group", None, "tiles"),  # one
    ],
)
def test_a_map_is_the_mean_of_the_whole_images(
    comm: MPI.Intracomm, shared_path: Path, tta: str, norm: Any, tile_px: int | None, method: str
) -> None:
    """Of group norm over the image each turned image has its own statistics."""
    scene = scene_of(comm, shared_path, SIZE)
    made = trained(comm, shared_path, scene, replace(OPTIONS, norm=norm, convolutions=1))
    found, done = turned_map(made, scene, comm, tta, tile_px=tile_px)
    assert done["method"] == method
    assert worst(found, mean_of_turns(made, scene, tta), scene) <= 1e-12


# Each size and each padding on one rank and over 2.
@pytest.mark.parametrize(
    ("padding", "size"),
    [
        pytest.param("same", (3, 90), marks=pytest.mark.ranks(1)),
        pytest.param("same", (31, 33), marks=pytest.mark.ranks(2)),
        pytest.param("same", (64, 97), marks=pytest.mark.ranks(1)),
        pytest.param("valid", (3, 90), marks=pytest.mark.ranks(2)),
        pytest.param("valid", (31, 33), marks=pytest.mark.ranks(1)),
        pytest.param("valid", (64, 97), marks=pytest.mark.ranks(2)),
    ],
    ids=str,
)
def test_awkward_sizes_with_and_without_padding(
    comm: MPI.Intracomm, shared_path: Path, size: tuple[int, int], padding: Any
) -> None:
    scene = scene_of(comm, shared_path, size)
    made = trained(comm, shared_path, scene, replace(OPTIONS, norm="none", padding=padding))
    found, _ = turned_map(made, scene, comm, "all", tile_px=8)
    assert worst(found, mean_of_turns(made, scene, "all"), scene) <= 1e-12


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["gated", "pyramid"])
def test_adopted_networks(comm: MPI.Intracomm, shared_path: Path, name: str) -> None:
    """Their layers know where a tile lies on the turned image, and take its averages."""
    scene = scene_of(comm, shared_path, (203, 157))
    made, _ = adopted(comm, shared_path, scene, network(name, drops=False))
    found, _ = turned_map(made, scene, comm, "flips", tile_px=96)
    unit = context_of(made.layers).alignment_px
    assert worst(found, mean_of_turns(made, scene, "flips", unit), scene) <= 1e-12


@pytest.mark.ranks(1, 2)
def test_other_outputs_and_parts_are_of_the_same_mean(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    scene = scene_of(comm, shared_path, SIZE)
    made = trained(
        comm,
        shared_path,
        scene,
        replace(OPTIONS, convolutions=1, norm="batch"),
        precision="float32",
    )
    wanted = mean_of_turns(made, scene, "all")
    network, image = str(made.folder), str(scene.image)
    how = {"tta": "all", "tile_px": 40, "device": "cpu"}
    scores = tilenet.predict(network, image, output="probabilities", **how)
    assert scores.dtype == np.float32
    assert np.abs(scores - wanted)[:, scene.valid].max() <= 1e-5
    part = tilenet.predict(network, image, output="probabilities", window=(30, 51, 60, 67), **how)
    np.testing.assert_array_equal(part, scores[:, 30:90, 51:118])
    out = shared_path / "map.tif"
    tilenet.predict(network, image, out, **how)
    with rasterio.open(out) as file:
        classes = file.read(1)
        assert file.tags()["TILENET_NOTE"] == "the mean over 8 turned images"
    assert (classes == scores.argmax(0))[scene.valid].all()
    assert (classes == 255)[~scene.valid].all()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("where", "at"), [("tiles_done", 2), ("sums_done", 50)])
def test_an_interrupted_map_goes_on_and_does_nothing_twice(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    where: str,
    at: int,
) -> None:
    """At a tile, or in the statistics of a later turned image."""
    scene = scene_of(comm, shared_path, SIZE)
    made = trained(comm, shared_path, scene, replace(OPTIONS, convolutions=1, norm="group"))
    computed, tiles = [], Mapper.tiles

    def counted(self: Mapper, *rest: Any) -> Any:
        computed.append(self)
        return tiles(self, *rest)

    monkeypatch.setattr(Mapper, "tiles", counted)
    wanted, _ = turned_map(made, scene, comm, "flips", tile_px=40)
    total = len(computed)
    computed.clear()
    (shared_path / "map.tif").unlink(missing_ok=True)
    comm.Barrier()
    how = str(made.folder), str(scene.image), str(shared_path / "map.tif"), "probabilities", 40
    asked = Prediction(*how, device="cpu", resume=True, tta="flips")
    with monkeypatch.context() as patch:
        interrupt(patch, where, at, ask)
        assert predict(asked, comm)["stopped"]
    sums = list(shared_path.glob(".map.tif.pieces.part/sums-*.json"))
    assert 5 < len(sums) <= 20  # five norms of each turned image
    assert (len(sums) == 20) == (where == "tiles_done")
    comm.Barrier()
    capfd.readouterr()
    assert not predict(asked, comm)["stopped"]
    with rasterio.open(shared_path / "map.tif") as file:
        np.testing.assert_array_equal(file.read(), wanted)
    comm.Barrier()
    assert len(computed) == total
    assert "starts over" not in capfd.readouterr().err


def test_turned_tiles_own_what_the_tiles_own() -> None:
    tiling = cut(93, 118, Cut(size_px=28), HaloRule(8, 4))
    whole = np.arange(93 * 118).reshape(93, 118)
    for symmetry in SYMMETRIES:
        turned, image = turned_tiling(tiling, symmetry), symmetry.turn(whole)
        assert (turned.height, turned.width) == image.shape
        np.testing.assert_array_equal(symmetry.back.turn(image), whole)
        for tile in tiling.tiles:
            own = overlap(tile.own, Window(0, 0, 93, 118))
            assert own is not None
            there = symmetry.back.source(own, *image.shape)
            assert symmetry.source(there, 93, 118) == own
            found = turned.tiles[turned.number(there)]
            assert overlap(found.own, there) == there
            assert (found.own.row % 4, found.own.col % 4, found.read.row % 4) == (0, 0, 0)


def test_the_mean_is_of_no_logits(tmp_path: Path) -> None:
    with pytest.raises(TilenetError, match="of probabilities"):
        Prediction("run", "a.tif", str(tmp_path / "m.tif"), "logits", tta="all").check()
