"""float16: steps that overflow are thrown away on all ranks together, and leave no trace."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from left_by_runs import check_bits, losses, same_tensors, weights, whole
from mpi4py import MPI
from test_same_as_whole_image import run_file, scenes_of

from tilenet.errors import AgreedError
from tilenet.library.whole_run import train
from tilenet.model import loss_scale
from tilenet.model.loss_scale import LossScale
from tilenet.parallel.sums.gradients import GradientSum
from tilenet.training.config.keys import NetworkKeys, OptimizerKeys, ScheduleKeys, TileKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.step import Step
from tilenet.training.update import Update

pytestmark = pytest.mark.ranks(1, 2)

FIRST = 2.0**18  # gradients of these images overflow until it is halved some ten times
NETWORK = NetworkKeys(poolings=2, base=4)  # no dropout: a step thrown away can be made again


def a_run(comm: MPI.Intracomm, path: Path, steps: int, **more: Any) -> RunFile:
    run = run_file(path, scenes_of(path, [(50, 61)], comm), NETWORK, tiles=TileKeys(2, 3))
    momentum = OptimizerKeys("sgd", 0.05, momentum=0.9)
    return replace(run, precision="float16", steps=steps, optimizer=momentum, **more)


def progress(run: RunFile) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(run.output) / "last" / "progress.json").read_text())
    return found


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Weights that this rank had at the end of each run."""
    found: list[dict[str, torch.Tensor]] = []
    close = Step.close

    def noting(self: Step) -> None:
        found.append({name: t.clone() for name, t in self.pipe.network.state_dict().items()})
        close(self)

    monkeypatch.setattr(Step, "close", noting)
    return found


def check_alike(comm: MPI.Intracomm, mine: dict[str, torch.Tensor]) -> None:
    """All ranks hold the same weights, to the bit."""
    first = comm.bcast({name: tensor.numpy() for name, tensor in mine.items()})
    assert same_tensors(mine, {name: torch.from_numpy(array) for name, array in first.items()})


def test_steps_that_overflow_leave_no_trace(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: list[dict[str, torch.Tensor]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(loss_scale, "FIRST", FIRST)
    run = a_run(comm, shared_path, steps=20)
    assert train(run, comm=comm) == 0
    check_alike(comm, ends[-1])
    said, left = losses(run), progress(run)
    thrown = 20 - left["calm_steps"]
    lines = capfd.readouterr().err.count("changed no weight, since float16")
    assert lines == (thrown if comm.rank == 0 else 0)
    assert 3 <= thrown <= 17
    assert left["loss_scale"] == FIRST / 2**thrown
    assert len(set(said[: thrown + 1])) == 1  # the same weights, step after step
    assert len(set(said[thrown:])) == 20 - thrown  # and then it learns
    assert said[-1] < said[0]
    # a run that begins with a scale that fits makes the same steps, to the bit
    monkeypatch.setattr(loss_scale, "FIRST", FIRST / 2**thrown)
    fits = replace(run, steps=20 - thrown, output=str(shared_path / "fits"))
    assert train(fits, comm=comm) == 0
    assert losses(fits) == said[thrown:]
    assert same_tensors(weights(fits), weights(run))


@pytest.mark.ranks(3)
def test_an_overflow_on_one_rank_is_that_of_all(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: list[dict[str, torch.Tensor]],
) -> None:
    original = Step._forward_backward

    def overflows_in_the_third(self: Step, batch: Any, images: Any) -> tuple[float, float]:
        kept = self.update
        if self.pipe.network.mask_key.step == 2 and comm.rank == comm.size - 1:
            self.update = replace(kept, scale=LossScale(2.0**60))
        found = original(self, batch, images)
        self.update = kept
        return found

    monkeypatch.setattr(Step, "_forward_backward", overflows_in_the_third)
    run = a_run(comm, shared_path, steps=5)
    assert train(run, comm=comm) == 0
    check_alike(comm, ends[-1])
    said, left = losses(run), progress(run)
    assert left["loss_scale"] == loss_scale.FIRST / 2
    assert left["calm_steps"] == 2
    assert said[2] == said[3]
    assert len(set(said)) == 4


def test_a_resumed_run_has_the_same_scale(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scale, "FIRST", FIRST)
    monkeypatch.setattr(loss_scale, "PATIENCE", 4)  # so that it is doubled again, too
    run = a_run(comm, shared_path, steps=24)
    wanted = whole(run, comm)
    assert losses(wanted)[-1] < losses(wanted)[0]
    for steps in (5, 18):  # while overflows last; and in the midst of calm steps
        assert train(replace(run, steps=steps), resume=True, comm=comm) == 0
    assert progress(run)["loss_scale"] != FIRST
    monkeypatch.setattr(loss_scale, "FIRST", 1.0)  # what the resumed run must not begin with
    assert train(run, resume=True, comm=comm) == 0
    assert progress(run) == progress(wanted)
    check_bits(run, wanted)


def test_no_scale_is_small_enough(comm: MPI.Intracomm, shared_path: Path) -> None:
    run = a_run(comm, shared_path, steps=99, class_weights=[1e30, 1e30, 1e30])
    with pytest.raises(AgreedError, match=r"float16 must hold the gradients .*use precision"):
        train(run, comm=comm)


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
def test_a_step_of_another_precision_is_not_thrown_away(
    comm: MPI.Intracomm, precision: str
) -> None:
    """A run that diverges would go on unseen otherwise, its loss finite for ever."""
    held, scale = torch.nn.Parameter(torch.randn(3, 5)), LossScale.of(precision)
    optimizer, gradients = torch.optim.SGD([held]), GradientSum([held], comm)
    gradients.zero()
    (held * float("inf")).sum().backward()  # type: ignore[no-untyped-call]
    gradients.finish()
    Update(optimizer, ScheduleKeys().rates(0.1, 9), scale).apply(gradients, 1.0, 0)
    gradients.close()
    assert not held.isfinite().any()
    assert scale == LossScale()
