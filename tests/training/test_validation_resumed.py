"""The best checkpoint is kept, and a run that was stopped leaves what an undisturbed one does."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from left_by_runs import stop_in, whole
from mpi4py import MPI
from validated_runs import SHAPES, a_run, kept, scripted, table

from tilenet.errors import AgreedError
from tilenet.predict import Prediction, predict
from tilenet.train import train
from tilenet.training.config.keys import ScheduleKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.scoring import Validation
from tilenet.training.validation import RunValidation


@pytest.mark.ranks(1)
@pytest.mark.parametrize("score", ["accuracy", "loss"])
def test_the_best_checkpoint_is_kept_and_of_equals_the_earlier_one(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch, score: Any
) -> None:
    run, held = a_run(comm, shared_path, steps=5)
    run = replace(run, validation=replace(run.validation, score=score))
    scripted(monkeypatch, [0.25, 0.75, 0.75, 0.5, 0.5])
    assert train(run, comm=comm) == 0
    names = [f"step-0000000{step}" for step in range(10)]
    assert kept(run) == (names[2], names[5], [names[2], *names[4:6]])
    scripted(monkeypatch, [0.7, 0.7, 0.75])
    assert train(replace(run, steps=8), resume=True, comm=comm) == 0
    assert kept(run) == (names[2], names[8], [names[2], *names[7:9]])
    scripted(monkeypatch, [0.9])
    rarely = replace(run, steps=9, checkpoint_every=100)
    assert train(rarely, resume=True, comm=comm) == 0
    assert kept(run) == (names[9], names[9], names[8:])
    asked = Prediction(f"{run.output}/best", str(held[0].image), str(shared_path / "map.tif"))
    assert predict(asked, comm)["size"] == list(SHAPES[0])


def stops_in_validation(comm: MPI.Intracomm, run: RunFile, patch: pytest.MonkeyPatch) -> None:
    original = Validation.score

    def asked(self: Validation, network: Any) -> Any:
        if comm.rank == comm.size - 1 and len(seen) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        seen.append(1)
        return original(self, network)

    seen: list[int] = []
    patch.setattr(Validation, "score", asked)
    assert train(run, comm=comm) == 75
    assert [row["step"] for row in table(run)] == ["2", "4"]  # it is made to its end
    assert len(table(run, "history.csv")) == 4


def stops_before_validation(comm: MPI.Intracomm, run: RunFile, patch: pytest.MonkeyPatch) -> None:
    stop_in(patch, comm, 4)
    assert train(run, comm=comm) == 75
    assert [row["step"] for row in table(run)] == ["2"]  # who is asked to stop has little time


def dies_after_validation(comm: MPI.Intracomm, run: RunFile, patch: pytest.MonkeyPatch) -> None:
    original = RunValidation.make

    def dies(self: RunValidation, step: int, *rest: Any) -> Any:
        found = original(self, step, *rest)
        if step == 4:
            raise AgreedError("killed")
        return found

    patch.setattr(RunValidation, "make", dies)
    with pytest.raises(AgreedError, match="killed"):
        train(run, comm=comm)
    assert [row["step"] for row in table(run)] == ["2", "4"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "stop", [stops_in_validation, stops_before_validation, dies_after_validation]
)
def test_a_run_that_was_stopped_leaves_what_an_undisturbed_one_does(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch, stop: Any
) -> None:
    run, _ = a_run(comm, shared_path, steps=5, checkpoint_every=100)
    schedule = ScheduleKeys("poly", power=2.0)
    run = replace(run, validation=replace(run.validation, every=2), schedule=schedule)
    scripted(monkeypatch, [0.25, 0.75, 0.5])
    wanted = whole(run, comm)
    monkeypatch.undo()
    scripted(monkeypatch, [0.25, 0.75, 0.75, 0.5] if "dies" in stop.__name__ else [0.25, 0.75, 0.5])
    with monkeypatch.context() as patch:
        stop(comm, run, patch)
    comm.Barrier()
    assert train(run, resume=True, comm=comm) == 0
    comm.Barrier()
    assert [row["step"] for row in table(run)] == ["2", "4", "5"]
    assert table(run) == table(wanted)
    assert table(run, "confusion.csv") == table(wanted, "confusion.csv")
    rates = [float(row["learning_rate"]) for row in table(run, "history.csv")]
    assert rates == pytest.approx([run.optimizer.lr * (1 - t / 5) ** 2 for t in range(5)])
    assert kept(run)[:2] == kept(wanted)[:2] == ("step-00000004", "step-00000005")
