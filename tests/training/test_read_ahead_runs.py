"""Reading ahead and staging change no bit of a run, on any number of ranks, and leave nothing."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from test_resume import rows, weights
from test_same_as_whole_image import NETWORKS, run_file
from whole_image import random_scene

from tilenet.data.rasters import cache as staged
from tilenet.data.rasters.cache import StagingFolder
from tilenet.data.rasters.raster import Raster
from tilenet.data.read_ahead import ReadAhead
from tilenet.errors import AgreedError, TilenetError
from tilenet.train import train
from tilenet.training.config.keys import AugmentKeys, OptimizerKeys, TileKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.step import Step


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "BLOCK_PX", 32)


def a_run(comm: MPI.Intracomm, path: Path, **more: Any) -> RunFile:
    """Three steps of two crops in 2 × 2 tiles each, one or two at a time."""
    scenes = [random_scene(path, (75, 96), seed, write=comm.rank == 0) for seed in (1, 2)]
    comm.Barrier()
    run = run_file(path, scenes, NETWORKS["same-transposed"], tiles=TileKeys(2, 2), micro_batches=2)
    augment = AugmentKeys(flips=True, brightness=0.3, contrast=0.2, noise=0.1)
    return replace(run, steps=3, crop_px=32, augment=augment, **more)


def check_nothing_is_left(comm: MPI.Intracomm, cache: Path) -> None:
    assert [t.name for t in threading.enumerate() if t.name == "reader"] == []
    comm.Barrier()
    assert list(cache.glob("*")) == []


@pytest.mark.ranks(1, 2)
def test_no_bit_depends_on_how_pixels_are_read(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = a_run(comm, shared_path, read_ahead=0)
    assert train(plain, comm=comm) == 0
    cache, written, most = shared_path / "cache", [0], [0]
    write, take = StagingFolder.write, ReadAhead.__next__

    def counted(self: StagingFolder, *rest: Any) -> None:
        written[0] += 1
        write(self, *rest)

    def waiting(self: ReadAhead[Any, Any]) -> Any:
        most[0] = max(most[0], self._made.qsize())
        return take(self)

    monkeypatch.setattr(StagingFolder, "write", counted)
    monkeypatch.setattr(ReadAhead, "__next__", waiting)
    for ahead, staging in ((0, True), (1, False), (3, False), (3, True)):
        written[0] = most[0] = 0
        run = replace(plain, read_ahead=ahead, cache_dir=str(cache) if staging else None)
        run = replace(run, output=str(shared_path / f"run {ahead} {staging}"))
        assert train(run, comm=comm) == 0
        assert [row["loss"] for row in rows(run)] == [row["loss"] for row in rows(plain)]
        kept = weights(run)
        assert all(torch.equal(kept[name], tensor) for name, tensor in weights(plain).items())
        check_nothing_is_left(comm, cache)
        assert (comm.allreduce(written[0]) > 0) == staging
        assert most[0] <= ahead


@pytest.mark.ranks(1, 2)
def test_ranks_of_a_node_read_a_file_once(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The survey has read all of it, so that training finds all blocks."""
    run = a_run(comm, shared_path, cache_dir=str(shared_path / "cache"))
    original, take, training, late = Raster._read_source, Step.take, [False], []

    def noted(self: Raster, window: Any) -> Any:
        if training[0] and self.staged is not None:
            late.append(window)
        return original(self, window)

    def begun(self: Step, *rest: Any) -> Any:
        training[0] = True
        return take(self, *rest)

    monkeypatch.setattr(Raster, "_read_source", noted)
    monkeypatch.setattr(Step, "take", begun)
    assert train(replace(run, read_ahead=0), comm=comm) == 0
    assert late == []


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("ahead", [0, 3])
def test_an_error_on_all_ranks_leaves_nothing(
    comm: MPI.Intracomm, shared_path: Path, ahead: int
) -> None:
    cache = shared_path / "cache"
    run = a_run(comm, shared_path, read_ahead=ahead, cache_dir=str(cache))
    explodes = replace(run, steps=60, optimizer=OptimizerKeys("sgd", 1e300))
    with pytest.raises(AgreedError, match="finite"):
        train(explodes, comm=comm)
    check_nothing_is_left(comm, cache)


@pytest.mark.ranks(1, 2)
def test_a_run_that_is_asked_to_stop_leaves_nothing_and_goes_on(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = shared_path / "cache"
    run = a_run(comm, shared_path, read_ahead=3, cache_dir=str(cache))
    whole = replace(run, output=str(shared_path / "whole"))
    assert train(whole, comm=comm) == 0
    original = Step.take

    def asked_in_the_second(self, step, reads, num_reads, images, stop):  # type: ignore[no-untyped-def]
        last = step == 1 and comm.rank == comm.size - 1
        return original(self, step, reads, num_reads, images, lambda: last or stop())

    with monkeypatch.context() as patch:
        patch.setattr(Step, "take", asked_in_the_second)
        assert train(run, comm=comm) == 75
    check_nothing_is_left(comm, cache)
    assert len(rows(run)) == 2
    assert train(run, resume=True, comm=comm) == 0
    assert [row["loss"] for row in rows(run)] == [row["loss"] for row in rows(whole)]
    kept = weights(run)
    assert all(torch.equal(kept[name], tensor) for name, tensor in weights(whole).items())


@pytest.mark.ranks(1)
def test_an_error_of_one_rank_leaves_nothing(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = shared_path / "cache"
    run = a_run(comm, shared_path, read_ahead=2, cache_dir=str(cache))
    original, reads = Raster.read, [0]

    def breaks(self: Raster, *rest: Any) -> Any:
        reads[0] += 1
        if reads[0] == 17:  # four in the survey, eight in each step, since labels are staged
            raise TilenetError("it broke")
        return original(self, *rest)

    monkeypatch.setattr(Raster, "read", breaks)
    with pytest.raises(TilenetError, match="it broke"):
        train(run, comm=comm)
    assert len(rows(run)) == 1
    check_nothing_is_left(comm, cache)


@pytest.mark.ranks(1, 2)
def test_a_cache_that_cannot_be_written_is_refused_by_all(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    run = a_run(comm, shared_path)
    with pytest.raises(AgreedError, match="cache_dir must be a folder that can be written"):
        train(replace(run, cache_dir=run.image_paths[0]), comm=comm)
    assert not (Path(run.output) / "history.csv").exists()
