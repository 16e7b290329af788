"""What runs left, whether two of them left the same, and runs to compare with."""

import csv
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from safetensors.torch import load_file

from tilenet.library.whole_run import train
from tilenet.training.config.run_file import RunFile
from tilenet.training.step import Step


def folder_of(run: RunFile | Path) -> Path:
    return run if isinstance(run, Path) else Path(run.output)


def rows(run: RunFile | Path, name: str = "history.csv") -> list[dict[str, str]]:
    with (folder_of(run) / name).open(newline="") as file:
        return list(csv.DictReader(file))


def losses(run: RunFile | Path) -> list[float]:
    return [float(row["loss"]) for row in rows(run)]


def weights(run: RunFile | Path) -> dict[str, torch.Tensor]:
    found = load_file(folder_of(run) / "last" / "weights.safetensors")
    return {name: tensor.clone() for name, tensor in found.items()}


def same_tensors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    assert found.keys() == wanted.keys()
    return all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def farthest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference of all tensors, each relative to its largest wanted value."""
    assert found.keys() == wanted.keys()
    apart = [
        (found[name] - tensor).double().abs().max() / tensor.double().abs().max().clamp(min=1e-30)
        for name, tensor in wanted.items()
        if tensor.is_floating_point()  # how many tiles were counted is a rank's own affair
    ]
    return float(torch.stack(apart).max())


def check_bits(found: RunFile, wanted: RunFile) -> None:
    assert losses(found) == losses(wanted)
    assert same_tensors(weights(found), weights(wanted))


def check_close(found: RunFile, wanted: RunFile) -> None:
    """Equal but for roundings."""
    assert [row["step"] for row in rows(found)] == [row["step"] for row in rows(wanted)]
    for ours, theirs in zip(losses(found), losses(wanted), strict=True):
        assert abs(ours - theirs) <= 1e-12
    assert farthest(weights(found), weights(wanted)) <= 1e-10


def whole(run: RunFile, comm: MPI.Intracomm) -> RunFile:
    """The run, undisturbed, in a folder of its own."""
    other = replace(run, output=f"{run.output}-whole")
    assert train(other, comm=comm) == 0
    return other


def alone(run: RunFile, comm: MPI.Intracomm, **changes: Any) -> RunFile:
    """The run on rank 0 alone. Collective."""
    other = replace(run, output=f"{run.output}-alone", **changes)
    on_first(other, comm)
    return other


def on_first(run: RunFile, comm: MPI.Intracomm, *, resume: bool = False) -> None:
    """Train on rank 0 alone, while the others wait."""
    if comm.rank == 0:
        assert train(run, comm=MPI.COMM_SELF, resume=resume) == 0
    comm.Barrier()


def stop_in(patch: pytest.MonkeyPatch, comm: MPI.Intracomm, number: int) -> None:
    """Let the last rank be asked to stop as a step begins."""
    take = Step.take

    def asked(self: Step, step: int, *rest: Any) -> Any:
        if step + 1 == number and comm.rank == comm.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(self, step, *rest)

    patch.setattr(Step, "take", asked)
