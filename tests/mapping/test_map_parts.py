"""Parts of maps: of the image, as in the whole map; of the work, done before an interruption."""

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import rasterio.shutil
import safetensors.torch
from mpi4py import MPI
from test_predict_norms import OPTIONS, Trained, scene_of, trained
from whole_image import Scene

import tilenet.mapping.map_source
import tilenet.mapping.predict
from tilenet.__main__ import main
from tilenet.data.read_ahead import ReadAhead
from tilenet.errors import AgreedError
from tilenet.geometry.windows import Window
from tilenet.mapping.mapper import Mapper
from tilenet.mapping.predict import predict
from tilenet.mapping.prediction import Prediction
from tilenet.mapping.writing.map_pieces import Pieces
from tilenet.mapping.writing.resume import MapResume
from tilenet.storage.checkpoints import link

SIZE = 157, 211
SHORT = replace(OPTIONS, convolutions=1)
PLAIN = replace(SHORT, norm="none")
TILED = {"tile_px": 56}  # 3 × 4 tiles
METHODS = {"tiles": (PLAIN, TILED), "passes": (SHORT, TILED), "exchange": (SHORT, {})}


@pytest.fixture(params=["tiles", "passes", "exchange"])
def made(request: pytest.FixtureRequest, comm: MPI.Intracomm, shared_path: Path) -> Any:
    """A scene, a checkpoint, and the options of a method to map it."""
    options, more = METHODS[request.param]
    scene = scene_of(comm, shared_path, SIZE)
    return scene, trained(comm, shared_path, scene, options, precision="float32"), more


def map_of(
    made: tuple[Scene, Trained, dict[str, Any]], comm: MPI.Intracomm, name: str, **more: Any
) -> tuple[Any, dict[str, Any]]:
    """Pixels and profile of the map; None where the ranks stopped before it was done."""
    scene, network, options = made
    out = network.folder / name
    given = {"overwrite": True, "device": "cpu", "output": "logits", **options, **more}
    done = predict(Prediction(str(network.folder), str(scene.image), str(out), **given), comm)
    found = None
    if not done["stopped"]:
        with rasterio.open(out) as file:
            found = file.read(), file.profile
    comm.Barrier()
    return found, done


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(
    ("made", "output"),
    [("tiles", "classes"), ("passes", "logits"), ("exchange", "logits"), ("exchange", "classes")],
    indirect=["made"],
)
def test_a_part_has_the_pixels_of_the_whole_map(
    comm: MPI.Intracomm, made: Any, output: str
) -> None:
    """On its place, to the last bit, wherever its edges lie on the tiles."""
    (whole, profile), _ = map_of(made, comm, "whole.tif", output=output)
    for window in [(0, 0, 157, 211), (51, 103, 2, 2), (31, 45, 100, 3)]:
        row, col, height, width = window
        (found, other), done = map_of(made, comm, "part.tif", output=output, window=window)
        wanted = whole[:, row : row + height, col : col + width]
        np.testing.assert_array_equal(found, wanted)
        assert done["size"] == [height, width]
        corner = profile["transform"] @ (col, row)
        assert other["transform"] @ (0, 0) == pytest.approx(corner, rel=1e-15)
        assert other["transform"] @ (7, 5) == pytest.approx(
            profile["transform"] @ (col + 7, row + 5), rel=1e-15
        )


@pytest.mark.ranks(2)
def test_a_box_is_mapped_where_it_lies_on_a_turned_grid(comm: MPI.Intracomm, made: Any) -> None:
    (whole, profile), _ = map_of(made, comm, "whole.tif")
    grid = profile["transform"]
    assert grid.b != 0
    x, y = grid @ (100, 70)
    (found, other), _ = map_of(made, comm, "part.tif", bbox=(x - 33, y - 47, x + 61, y + 12))
    col, row = (round(value) for value in ~grid @ (other["transform"] @ (0, 0)))
    wanted = whole[:, row : row + found.shape[1], col : col + found.shape[2]]
    np.testing.assert_array_equal(found, wanted)
    corners = [(x - 33, y - 47), (x - 33, y + 12), (x + 61, y - 47), (x + 61, y + 12)]
    cols, rows = zip(*(~other["transform"] @ corner for corner in corners), strict=True)
    for places, pixels in ((rows, found.shape[1]), (cols, found.shape[2])):
        assert 0 <= min(places) < 1
        assert pixels - 1 < max(places) <= pixels


@pytest.mark.ranks(2)
def test_only_tiles_under_the_part_are_computed(
    comm: MPI.Intracomm, made: Any, counted: list[Any]
) -> None:
    _, done = map_of(made, comm, "part.tif", window=(30, 70, 30, 40))
    if done["method"] != "exchange" and done["grid"] != [1, 1]:
        assert sum(comm.allgather(len(counted))) == 2 * 2


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Tiles that this rank maps."""
    tiles, seen = Mapper.tiles, []

    def count(mapper: Mapper, pipe: Any, some: Any, inputs: Any) -> Any:
        seen.extend(some)
        return tiles(mapper, pipe, some, inputs)

    monkeypatch.setattr(Mapper, "tiles", count)
    return seen


@pytest.mark.ranks(3)
def test_each_rank_writes_what_it_computed(
    comm: MPI.Intracomm, made: Any, counted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    put, mine = Pieces.put, list[Window]()

    def note(pieces: Pieces, window: Window, values: Any, *, lasting: bool) -> None:
        mine.append(window)
        put(pieces, window, values, lasting=lasting)

    monkeypatch.setattr(Pieces, "put", note)
    _, done = map_of(made, comm, "map.tif")
    theirs = comm.allgather(mine)
    assert all(theirs)
    assert sum(one.height * one.width for some in theirs for one in some) == SIZE[0] * SIZE[1]
    if done["method"] != "exchange":
        places = [(tile.own.row, tile.own.col) for tile in counted]
        assert [(one.row, one.col) for one in mine] == places  # without what is beyond the edge


@pytest.mark.ranks(2)
def test_scaled_probabilities_are_the_nearest_bytes(comm: MPI.Intracomm, made: Any) -> None:
    exact = replace_precision(made, "float64")
    (probabilities, _), _ = map_of(exact, comm, "float.tif", output="probabilities")
    (levels, profile), _ = map_of(exact, comm, "bytes.tif", output="probabilities", scaled=True)
    valid = made[0].valid
    assert profile["dtype"] == "uint8"
    assert (levels[:, ~valid] == 255).all()
    assert np.isnan(probabilities[:, ~valid]).all()
    assert len(np.unique(levels)) > 100
    difference = np.abs(levels / 250 - probabilities)[:, valid]
    assert difference.max() <= 0.5 / 250 + 1e-15


def replace_precision(made: Any, precision: str) -> Any:
    scene, network, options = made
    return scene, network, {**options, "precision": precision}


# --- interruptions


class Interruption(Exception):
    pass


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What this rank takes of the windows that it reads, for statistics or the map."""
    take, seen = ReadAhead.__next__, list[Any]()

    def count(reads: ReadAhead[Any, Any]) -> Any:
        taken = take(reads)
        seen.append(taken[1].shape)
        return taken

    monkeypatch.setattr(ReadAhead, "__next__", count)
    return seen


def interrupt(
    monkeypatch: pytest.MonkeyPatch, method: str, at: int, act: Callable[[], None]
) -> None:
    """Act at the end of so many rounds of a pass; later ones are left alone."""
    done, rounds = getattr(MapResume, method), []

    def count(*arguments: Any, **more: Any) -> None:
        rounds.append(1)
        if len(rounds) == at and act is not fail:
            act()
        done(*arguments, **more)
        if len(rounds) == at and act is fail:
            act()

    monkeypatch.setattr(MapResume, method, count)


def fail() -> None:
    raise Interruption


def ask() -> None:
    """The batch system asks one rank, no matter which."""
    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(
    ("method", "where", "at", "act", "alone"),
    [
        ("tiles", "tiles_done", 2, fail, True),
        ("tiles", "tiles_done", 2, ask, False),
        ("passes", "tiles_done", 2, ask, False),
        ("passes", "sums_done", 6, fail, True),
    ],
)
def test_an_interrupted_map_goes_on_and_does_nothing_twice(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inputs: list[Any],
    method: str,
    where: str,
    at: int,
    act: Callable[[], None],
    alone: bool,
) -> None:
    """On the same ranks, or on a single one; to the last bit."""
    options, more = METHODS[method]
    scene = scene_of(comm, shared_path, SIZE)
    made = scene, trained(comm, shared_path, scene, options, precision="float32"), more
    (wanted, _), done = map_of(made, comm, "whole.tif")
    assert done["method"] == method
    total = sum(comm.allgather(len(inputs)))
    inputs.clear()
    interrupt(monkeypatch, where, at, act)
    if act is fail:
        with pytest.raises(Interruption):
            map_of(made, comm, "map.tif", resume=True)
    else:
        found, done = map_of(made, comm, "map.tif", resume=True)
        assert found is None
        assert done["stopped"]
    comm.Barrier()
    assert not (shared_path / "map.tif").exists()
    first = sum(comm.allgather(len(inputs)))
    assert 0 < first < total
    inputs.clear()
    comm.Barrier()
    found = None
    if not alone:
        (found, _), done = map_of(made, comm, "map.tif", resume=True)
    elif comm.rank == 0:
        (found, _), done = map_of(made, MPI.COMM_SELF, "map.tif", resume=True)
    if found is not None:
        np.testing.assert_array_equal(found, wanted)
        assert not done["stopped"]
    assert first + sum(comm.allgather(len(inputs))) == total
    assert not list(shared_path.glob(".*part"))


@pytest.mark.ranks(2)
def test_a_signal_before_the_first_tile_is_not_lost(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPICH catches SIGUSR1 by itself, and does nothing."""
    options, more = METHODS["tiles"]
    scene = scene_of(comm, shared_path, SIZE)
    made = scene, trained(comm, shared_path, scene, options, precision="float32"), more
    (wanted, _), _ = map_of(made, comm, "whole.tif")
    original = tilenet.mapping.predict.decide_map

    def asked(*arguments: Any, **more: Any) -> Any:
        ask()
        return original(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(tilenet.mapping.predict, "decide_map", asked)
        found, done = map_of(made, comm, "map.tif", resume=True)
    assert found is None
    assert done["stopped"]
    (found, _), _ = map_of(made, comm, "map.tif", resume=True)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("resume", [False, True])
def test_a_disk_that_is_full_for_one_rank_ends_the_map_on_all(
    comm: MPI.Intracomm,
    shared_path: Path,
    made: Any,
    monkeypatch: pytest.MonkeyPatch,
    no_room: object,
    resume: bool,
) -> None:
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(Pieces, "put", no_room)
        with pytest.raises(AgreedError, match=r"writable to its end \(.*No space left"):
            map_of(made, comm, "map.tif", resume=resume)
    comm.Barrier()
    assert not (shared_path / "map.tif").exists()
    kept = resume and made[2]  # not where all windows are computed at once
    assert bool(list(shared_path.glob(".map.tif.pieces.part/*.raw"))) == bool(kept)
    comm.Barrier()
    (found, _), _ = map_of(made, comm, "map.tif", resume=resume)
    (wanted, _), _ = map_of(made, comm, "whole.tif")
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"precision": "float64"}, "precision"),
        ({"halo": 24}, "the tiles"),
        ({"output": "probabilities", "scaled": True}, "output"),
        ({"window": (0, 0, 157, 210)}, "the part of the image"),
        ({"nodata": 7.0}, "nodata"),
        ("weights.safetensors", "the weights"),
        ("image1.tif", "the image"),
    ],
)
def test_what_was_made_of_something_else_is_made_anew(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    inputs: list[Any],
    change: Any,
    why: str,
) -> None:
    options, more = METHODS["tiles"]
    scene = scene_of(comm, shared_path, SIZE)
    made = scene, trained(comm, shared_path, scene, options, precision="float32"), more
    changes = change if isinstance(change, dict) else {}
    with monkeypatch.context() as patch:
        interrupt(patch, "tiles_done", 2, fail)
        with pytest.raises(Interruption):
            map_of(made, comm, "map.tif", resume=True)
    comm.Barrier()
    if comm.rank == 0 and not changes:
        path = shared_path / change
        if change.endswith("tif"):
            os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        else:
            data = bytearray(path.read_bytes())
            data[-3] ^= 1
            path.write_bytes(data)
    comm.Barrier()
    inputs.clear()
    capfd.readouterr()
    (found, _), done = map_of(made, comm, "map.tif", resume=True, **changes)
    said = "".join(comm.allgather(capfd.readouterr().err))
    assert f"starts over, since what was done of it is of something else: {why}" in said
    assert sum(comm.allgather(len(inputs))) == np.prod(done["grid"])
    (wanted, _), _ = map_of(made, comm, "whole.tif", **changes)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.ranks(1)
def test_an_image_under_two_vrts_may_not_change_either(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    options, more = METHODS["tiles"]
    scene = scene_of(comm, shared_path, SIZE)
    network = trained(comm, shared_path, scene, options, precision="float32")
    inner, outer = shared_path / "inner.vrt", shared_path / "outer.vrt"
    rasterio.shutil.copy(scene.image, inner, driver="VRT")
    outer.write_text(inner.read_text().replace(Path(scene.image).name, inner.name))
    made = replace(scene, image=outer), network, more
    with monkeypatch.context() as patch:
        interrupt(patch, "tiles_done", 2, fail)
        with pytest.raises(Interruption):
            map_of(made, comm, "map.tif", resume=True)
    os.utime(scene.image, ns=(0, os.stat(scene.image).st_mtime_ns + 1))
    capfd.readouterr()
    map_of(made, comm, "map.tif", resume=True)
    assert "is of something else: the image" in capfd.readouterr().err


@pytest.mark.ranks(2)
def test_exchange_says_that_it_is_not_interrupted(
    comm: MPI.Intracomm, shared_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options, more = METHODS["exchange"]
    scene = scene_of(comm, shared_path, SIZE)
    made = scene, trained(comm, shared_path, scene, options, precision="float32"), more
    capfd.readouterr()
    (found, _), done = map_of(made, comm, "map.tif", resume=True)
    said = "".join(comm.allgather(capfd.readouterr().err))
    assert ("is not interrupted" in said) == (done["method"] == "exchange") == (comm.size > 1)
    (wanted, _), _ = map_of(made, comm, "whole.tif")
    np.testing.assert_array_equal(found, wanted)


# --- refusals


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("more", "code", "sentence"),
    [
        (("--bbox", "0,0,1,1"), 1, "a bbox must touch the image"),
        (("--bbox", "-71.5,42.1,-71.4,42.2"), 1, "a bbox must touch the image (bbox: -71.5,42.1"),
        (("--bbox", "nan,0,1,1"), 1, "four finite numbers"),
        (("--bbox", "1,1,1,2"), 1, "XMIN below XMAX"),
        (("--bbox", "1,2,3"), 1, "four finite numbers"),
        (("--bbox", "1,2,3,north"), 2, "joined by commas (1,2,3,north); write XMIN,YMIN"),
        (("--nodata", "black"), 2, "nodata is a number, nan, none or collar"),
        (("--partitions", "0"), 1, "a network has at least one partition (partitions: 0)"),
        (("--window", "0,0,0,9"), 1, "lies inside the image"),
        (("--window", "-1,0,9,9"), 1, "lies inside the image (window: -1,0,9,9"),
        (("--window", "1.5,0,9,9"), 2, "whole numbers joined by commas (1.5,0,9,9)"),
        (("--window", "0,0,9,9", "--bbox", "1,2,3,4"), 2, "not allowed with"),
        (("--scaled",), 1, "only probabilities are scaled"),
        (("--scaled", "--output", "logits"), 1, "only probabilities are scaled"),
    ],
)
def test_refusals(
    comm: MPI.Intracomm,
    shared_path: Path,
    capfd: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    code: int,
    sentence: str,
) -> None:
    scene = scene_of(comm, shared_path, SIZE)
    folder = trained(comm, shared_path, scene, PLAIN).folder
    capfd.readouterr()
    out = shared_path / "map.tif"
    assert main(["predict", str(folder), str(scene.image), str(out), *more]) == code
    said = "".join(comm.allgather(capfd.readouterr().err))
    assert said.count(sentence) == 1
    assert not list(shared_path.glob("*map.tif*"))


@pytest.mark.ranks(2)
def test_a_part_is_named_once(comm: MPI.Intracomm, made: Any) -> None:
    with pytest.raises(AgreedError, match="named once"):
        map_of(made, comm, "map.tif", window=(0, 0, 9, 9), bbox=(5e5, 3e6, 6e5, 5e6))


@pytest.mark.ranks(1, 2)
def test_a_run_that_saves_meanwhile_is_mapped_as_it_was_opened(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`last` names another checkpoint as soon as rank 0 has read the one before."""
    options, more = METHODS["tiles"]
    scene = scene_of(comm, shared_path, SIZE)
    network = trained(comm, shared_path, scene, options, precision="float32")
    run = shared_path / "run"
    if comm.rank == 0:
        for name, factor in (("old", 1.0), ("new", 1.5)):
            (run / name).mkdir(parents=True)
            shutil.copy(shared_path / "network.json", run / name)
            weights = safetensors.torch.load_file(shared_path / "weights.safetensors")
            scaled = {key: factor * tensor for key, tensor in weights.items()}
            safetensors.torch.save_file(scaled, run / name / "weights.safetensors")
        link(run, "last", run / "old")
    comm.Barrier()
    old, new, last = ((scene, replace(network, folder=run / f), more) for f in ("old", "new", ""))
    (before, _), _ = map_of(old, comm, "map.tif")
    (after, _), _ = map_of(new, comm, "map.tif")
    assert not np.array_equal(before, after, equal_nan=True)
    right = tilenet.mapping.map_source._open_network

    def opened(*arguments: Any, **more: Any) -> Any:
        if comm.rank:
            comm.Barrier()
        found = right(*arguments, **more)
        if comm.rank == 0:
            link(run, "last", run / "new")
            comm.Barrier()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(tilenet.mapping.map_source, "_open_network", opened)
        (found, _), _ = map_of(last, comm, "map.tif")
        np.testing.assert_array_equal(found, before)
        if comm.rank == 0:
            link(run, "last", run / "old")
        comm.Barrier()
        interrupt(patch, "tiles_done", 2, ask)
        assert map_of(last, comm, "going.tif", resume=True)[1]["stopped"]
    (found, _), _ = map_of(last, comm, "going.tif", resume=True)
    np.testing.assert_array_equal(found, after)
