"""Maps whose next window is read while one is computed: the same bits, the same errors, no rest."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_swept_maps
import torch
from mpi4py import MPI
from test_map_parts import METHODS, Interruption, fail, interrupt, map_of
from test_predict_norms import scene_of, trained

import tilenet.mapping.mapper
from tilenet.data.read_ahead import ReadAhead
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window
from tilenet.mapping.mapper import Computed, Mapper

pytestmark = pytest.mark.ranks(1, 2)

SIZE = 203, 157
WAYS = ("tiles", "passes", "sweep", "exchanging columns")


class NoneAhead(ReadAhead[Any, Any]):
    def __init__(self, read: Any, items: Any, ahead: int) -> None:
        super().__init__(read, items, 0)


@pytest.fixture(params=WAYS)
def made(
    request: pytest.FixtureRequest,
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """A scene, a checkpoint, and the options of a way to map it."""
    way = request.param
    options, more = METHODS.get(way, (METHODS["passes"][0], {}))
    if way not in METHODS:
        test_swept_maps.little_memory.__wrapped__(monkeypatch)
    if way == "exchanging columns":
        if comm.size == 1:
            pytest.skip("one rank has nobody to exchange halos with")
        test_swept_maps.that_exchange(monkeypatch)
    scene = scene_of(comm, shared_path, SIZE)
    return scene, trained(comm, shared_path, scene, options, precision="float32"), more


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "reader"]


def test_no_bit_depends_on_it(
    comm: MPI.Intracomm, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found, _), done = map_of(made, comm, "ahead.tif")
    assert readers() == []
    assert np.prod(done["grid"]) > comm.size
    monkeypatch.setattr(tilenet.mapping.mapper, "ReadAhead", NoneAhead)
    (wanted, _), _ = map_of(made, comm, "plain.tif")
    np.testing.assert_array_equal(found, wanted)


def test_the_next_window_is_read_before_the_map_takes_one(
    comm: MPI.Intracomm, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is read, the map goes on."""
    begun, of_map = threading.Semaphore(0), [0]
    read, take = Mapper.input, Mapper.values

    def reading(self: Mapper, window: Window) -> Any:
        if threading.current_thread() is not threading.main_thread():
            begun.release()
        return read(self, window)

    def taking(self: Mapper, computed: Computed) -> Any:
        of_map[0] += 1
        if of_map[0] == 1:
            # More than what was computed: the one after it too.
            assert all(begun.acquire(timeout=60) for _ in range(2))
        return take(self, computed)

    monkeypatch.setattr(Mapper, "input", reading)
    monkeypatch.setattr(Mapper, "values", taking)
    map_of(made, comm, "map.tif")
    assert sum(comm.allgather(of_map[0])) > 1


@pytest.mark.parametrize("what", ["interrupted", "broken"])
def test_a_map_that_ends_early_leaves_no_thread(
    comm: MPI.Intracomm, made: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "interrupted":
        interrupt(monkeypatch, "tiles_done", 2, fail)
    else:
        numbers, read = [0], Mapper.input

        def broken(self: Mapper, window: Window) -> Any:
            numbers[0] += 1
            if numbers[0] == 3:
                raise TilenetError("a block is broken")
            return read(self, window)

        monkeypatch.setattr(Mapper, "input", broken)
    with pytest.raises(Interruption if what == "interrupted" else TilenetError):
        map_of(made, comm, "map.tif", resume=True)
    assert readers() == []
    comm.Barrier()


@pytest.mark.parametrize("count", [5, 255, 300, 40_000])
def test_classes_come_to_the_host_as_narrow_as_they_are_written(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    mapper = object.__new__(Mapper)
    kind = "uint8" if count <= 255 else "uint16"
    mapper.output = "classes"
    mapper.kind = tilenet.mapping.mapper.MapKind(1, kind, np.iinfo(kind).max, None)
    rng = np.random.default_rng(count)
    logits = rng.normal(size=(count, 9, 11)).astype(np.float32)
    valid = rng.random((9, 11)) < 0.8
    copied, copy = list[int](), torch.Tensor.cpu
    monkeypatch.setattr(
        torch.Tensor, "cpu", lambda self: copied.append(self.element_size()) or copy(self)
    )
    found = mapper.values(Computed(torch.from_numpy(logits), valid))
    wanted = np.where(valid, logits.argmax(0), np.iinfo(kind).max)
    assert found.dtype == kind
    np.testing.assert_array_equal(found[0], wanted)
    assert copied == [np.dtype(kind).itemsize]
