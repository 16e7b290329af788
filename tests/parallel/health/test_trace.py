"""A trace of some steps: what it holds, that it changes nothing, and that a run outlives it."""

import gzip
import json
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from left_by_runs import check_bits, rows, stop_in
from mpi4py import MPI
from test_same_as_whole_image import NETWORKS, run_file, scenes_of

from tilenet.library.whole_run import train
from tilenet.parallel.health import trace as module
from tilenet.training.config.keys import ProfileKeys, TileKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.step import Step

pytestmark = pytest.mark.ranks(1, 2)

FILES = ["trace-rank0.json.gz"]


def a_run(comm: MPI.Intracomm, path: Path, profiled: str | None, **more: Any) -> RunFile:
    """Five steps over two partitions, whose workers are threads."""
    (scene,) = scenes_of(path, [(90, 121)], comm)
    run = run_file(path, [scene], NETWORKS["valid"], tiles=TileKeys(2, 3), micro_batches=2)
    run = replace(run, steps=5, partitions=2, profile=ProfileKeys(profiled), **more)
    return replace(run, output=str(path / f"run of {profiled}"))


def events(run: RunFile) -> list[dict[str, Any]]:
    with gzip.open(Path(run.output) / "trace-rank0.json.gz", "rt") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return [event for event in found if event["ph"] == "X"]


def left(run: RunFile) -> list[str]:
    """What a run left but what every run leaves."""
    every = {"history.csv", "checkpoints", "last", "run.yaml", "run.json", "timings.json"}
    every |= {"survey.safetensors", ".lock"}  # rank 0 may still hold the lock
    return sorted({*os.listdir(run.output)} - every)


def test_a_run_begun_anew_has_no_trace_of_the_one_before(
    comm: MPI.Intracomm, shared_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(comm, shared_path, "2")
    assert train(run, comm=comm) == 0
    assert left(run) == FILES
    assert train(replace(run, steps=6, profile=ProfileKeys("5-6")), resume=True, comm=comm) == 0
    comm.Barrier()
    assert ("json.gz: steps 6 to 6 of rank 0" in capsys.readouterr().err) == (comm.rank == 0)
    assert train(replace(run, profile=ProfileKeys()), overwrite=True, comm=comm) == 0
    comm.Barrier()
    assert left(run) == []


def marks_of(run: RunFile) -> list[dict[str, Any]]:
    marks = [event for event in events(run) if event["cat"] == "user_annotation"]
    return [mark for mark in marks if mark["name"].startswith("ProfilerStep")]


def steps_in(run: RunFile) -> list[str]:
    return [mark["name"] for mark in marks_of(run)]


def names(count: int) -> list[str]:
    return [f"ProfilerStep#{number}" for number in range(1, count + 1)]


def test_a_trace_holds_its_steps_and_changes_nothing(
    comm: MPI.Intracomm, shared_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, traced = a_run(comm, shared_path, None), a_run(comm, shared_path, "2-3")
    assert train(plain, comm=comm) == 0
    assert train(traced, comm=comm) == 0
    said = capsys.readouterr().err
    check_bits(traced, plain)
    assert (left(plain), left(traced)) == ([], FILES)
    if comm.rank > 0:
        assert "trace" not in said
        return
    assert steps_in(traced) == names(2)
    marks = marks_of(traced)
    backward = [event for event in events(traced) if "Backward" in event["name"]]
    assert backward
    inside = [any(m["ts"] <= e["ts"] <= m["ts"] + m["dur"] for m in marks) for e in backward]
    assert all(inside)
    # in a worker's thread, which is not the caller's
    computing = {e["tid"] for e in events(traced) if e["name"] == "aten::conv2d"}
    assert computing - {mark["tid"] for mark in marks}
    assert "trace-rank0.json.gz: steps 2 to 3 of rank 0, " in said
    took = [float(row["seconds"]) for row in rows(traced)[1:3]]
    assert all(m["dur"] / 1e6 >= seconds for m, seconds in zip(marks, took, strict=True))


def test_a_run_may_end_before_its_trace(
    comm: MPI.Intracomm, shared_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(comm, shared_path, "4-20")
    assert train(run, comm=comm) == 0
    if comm.rank == 0:
        assert steps_in(run) == names(2)
    # one that goes on behind its steps says so, and keeps what it has
    comm.Barrier()
    before = (Path(run.output) / FILES[0]).read_bytes()
    assert ("trace-rank0.json.gz: steps 4 to 5 of" in capsys.readouterr().err) == (comm.rank == 0)
    on = replace(run, steps=6, profile=ProfileKeys("2-4"))
    assert train(on, resume=True, comm=comm) == 0
    said = capsys.readouterr().err
    wanted = "no trace of steps 2 to 4 was written (the run made none of them); "
    assert (wanted in said) == (comm.rank == 0)
    assert (Path(run.output) / FILES[0]).read_bytes() == before
    assert left(run) == FILES


def test_a_signal_within_a_trace_leaves_a_checkpoint_and_what_there_is_of_it(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(comm, shared_path, "2-4")
    write = module.TraceRecorder._write
    saved: list[bool] = []

    def watched(*what: Any) -> None:
        saved.append((Path(run.output) / "checkpoints" / "step-00000003").exists())
        write(*what)

    with monkeypatch.context() as patch:
        stop_in(patch, comm, 3)
        patch.setattr(module.TraceRecorder, "_write", watched)
        assert train(run, comm=comm) == 75
    assert len(rows(run)) == 3
    assert saved == [True] * (comm.rank == 0)  # the checkpoint first: what is left may be short
    if comm.rank == 0:
        assert steps_in(run) == names(2)


def refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("not on\nthis machine")


def end_and_refuse(self: torch.profiler.profile, end: Any = torch.profiler.profile.stop) -> None:
    self.on_trace_ready = None
    end(self)  # a profiler that is left running may crash what the process does next
    refuse()


def no_room(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("where", "what", "why"),
    [
        (module.profile, {"start": refuse}, "not on this machine"),
        (module.profile, {"stop": end_and_refuse}, "not on this machine"),
        (module.shutil, {"copyfileobj": no_room}, "[Errno 28] No space left on device"),
    ],
    ids=["start", "stop", "trace"],
)
def test_a_run_goes_on_without_a_trace_that_fails(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: Any,
    what: dict[str, Callable[..., None]],
    why: str,
) -> None:
    run = a_run(comm, shared_path, "2-3")
    for name, instead in what.items():
        monkeypatch.setattr(where, name, instead)
    assert train(run, comm=comm) == 0
    said = capsys.readouterr().err
    sentence = f"no trace of steps 2 to 3 was written ({why}); the run is as without it\n"
    assert said.count(sentence) == (comm.rank == 0)
    assert len(rows(run)) == 5
    assert left(run) == []


def test_a_full_disk_takes_the_trace_and_not_the_run(
    comm: MPI.Intracomm, shared_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(comm, shared_path, "2-3")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, limits[1]))  # more than a checkpoint's
    try:
        assert train(run, comm=comm) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert ("no trace of steps 2 to 3 was written (the profiler found no room" in said) == (
        comm.rank == 0
    )
    assert len(rows(run)) == 5
    assert left(run) == []


def test_without_the_key_nothing_of_the_profiler_runs(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    for name in ("profile", "schedule", "gzip"):
        monkeypatch.setattr(module, name, lambda *_, name=name, **__: used.append(name))
    assert train(a_run(comm, shared_path, None), comm=comm) == 0
    assert used == []


def test_an_error_in_a_step_is_raised_and_the_profiler_ends(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Step.take

    def breaks_in_the_third(self: Step, step: int, *rest: Any) -> Any:
        if step == 2:
            raise KeyboardInterrupt
        return take(self, step, *rest)

    run = a_run(comm, shared_path, "2-4")
    if comm.rank == 0:
        with monkeypatch.context() as patch:
            patch.setattr(Step, "take", breaks_in_the_third)
            with pytest.raises(KeyboardInterrupt):
                train(run, comm=MPI.COMM_SELF)
        assert left(run) == []
        assert not torch.autograd._profiler_enabled()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("write", [True, False])
def test_all_ranks_know_which_steps_take_longer(write: bool) -> None:
    recorder = module.TraceRecorder(Path(), range(40, 61), [torch.device("cpu")], write=write)
    assert [number for number in range(1, 99) if recorder.slows(number)] == [40, 61]
    recorder = module.TraceRecorder(Path(), range(0), [torch.device("cpu")], write=write)
    assert not any(recorder.slows(number) for number in range(99))
