"""Reading ahead changes no bit of a run, on any number of ranks, and leaves nothing."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from left_by_runs import check_bits, rows, stop_in, whole
from mpi4py import MPI
from test_same_as_whole_image import NETWORKS, run_file, scenes_of

from tilenet.data.rasters.raster import Raster
from tilenet.data.read_ahead import ReadAhead
from tilenet.errors import AgreedError, TilenetError
from tilenet.library.whole_run import train
from tilenet.training.config.keys import AugmentKeys, OptimizerKeys, TileKeys
from tilenet.training.config.run_file import RunFile


def a_run(comm: MPI.Intracomm, path: Path, **more: Any) -> RunFile:
    """Three steps of two crops in 2 × 2 tiles each, one or two at a time."""
    scenes = scenes_of(path, [(75, 96)] * 2, comm)
    run = run_file(path, scenes, NETWORKS["same-transposed"], tiles=TileKeys(2, 2), micro_batches=2)
    augment = AugmentKeys(flips=True, brightness=0.3, contrast=0.2, noise=0.1)
    return replace(run, steps=3, crop_px=32, augment=augment, **more)


def check_nothing_is_left(comm: MPI.Intracomm) -> None:
    assert [t.name for t in threading.enumerate() if t.name == "reader"] == []
    comm.Barrier()


@pytest.mark.ranks(1, 2)
def test_no_bit_depends_on_how_pixels_are_read(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = a_run(comm, shared_path, read_ahead=0)
    assert train(plain, comm=comm) == 0
    most, take = [0], ReadAhead.__next__

    def waiting(self: ReadAhead[Any, Any]) -> Any:
        most[0] = max(most[0], self._results.qsize())
        return take(self)

    monkeypatch.setattr(ReadAhead, "__next__", waiting)
    for ahead in (1, 3):
        most[0] = 0
        run = replace(plain, read_ahead=ahead, output=str(shared_path / f"run {ahead}"))
        assert train(run, comm=comm) == 0
        check_bits(run, plain)
        check_nothing_is_left(comm)
        assert most[0] <= ahead


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("ahead", [0, 3])
def test_an_error_on_all_ranks_leaves_nothing(
    comm: MPI.Intracomm, shared_path: Path, ahead: int
) -> None:
    run = a_run(comm, shared_path, read_ahead=ahead)
    explodes = replace(run, steps=60, optimizer=OptimizerKeys("sgd", 1e300))
    with pytest.raises(AgreedError, match="finite"):
        train(explodes, comm=comm)
    check_nothing_is_left(comm)


@pytest.mark.ranks(1, 2)
def test_a_run_that_is_asked_to_stop_leaves_nothing_and_goes_on(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(comm, shared_path, read_ahead=3)
    wanted = whole(run, comm)
    with monkeypatch.context() as patch:
        stop_in(patch, comm, 2)
        assert train(run, comm=comm) == 75
    check_nothing_is_left(comm)
    assert len(rows(run)) == 2
    assert train(run, resume=True, comm=comm) == 0
    check_bits(run, wanted)


@pytest.mark.ranks(1)
def test_an_error_of_one_rank_leaves_nothing(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(comm, shared_path, read_ahead=2)
    original, reads = Raster.read, [0]

    def breaks(self: Raster, *rest: Any) -> Any:
        reads[0] += 1
        if reads[0] == 29:  # four in the survey, sixteen in each step
            raise TilenetError("it broke")
        return original(self, *rest)

    monkeypatch.setattr(Raster, "read", breaks)
    with pytest.raises(TilenetError, match="it broke"):
        train(run, comm=comm)
    assert len(rows(run)) == 1
    check_nothing_is_left(comm)
