"""Runs of somebody else's networks prove themselves, or end with a sentence on all ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI
from shared_out import grids
from test_adopted_runs import CLASSES, SIZE, keys_of
from test_same_as_whole_image import run_file, scenes_of

from tilenet.train import train
from tilenet.training.config.keys import MeshKeys
from tilenet.training.config.run_file import RunFile

pytestmark = pytest.mark.ranks(1, 2, 4)

WAYS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "exchange": {"halo_mode": "exchange"},
    "pipeline": {"partitions": 3, "checkpointing": "always"},
}


def grid_of(comm: MPI.Intracomm) -> tuple[int, int]:
    possible = grids(comm.size)
    return possible[len(possible) // 2]


def run_of(
    folder: Path, comm: MPI.Intracomm, name: str, batch_norm: str = "frozen", **more: Any
) -> RunFile:
    (scene,) = scenes_of(folder, [SIZE], comm)
    mesh = MeshKeys(1, *grid_of(comm))
    run = run_file(folder, [scene], keys_of(name, batch_norm), mesh=mesh, **more)
    return replace(run, classes=CLASSES[name], steps=1)


def said_of(capfd: pytest.CaptureFixture[str], comm: MPI.Intracomm) -> str:
    """What rank 0 said; the others say nothing. Collective."""
    said = comm.gather(capfd.readouterr().err)
    return comm.bcast("" if said is None else said[0])


def proof_in(said: str) -> str:
    lines = [line for line in said.splitlines() if "proved" in line]
    assert len(lines) == 1, said
    return lines[0]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch_norm", ["frozen", "step"])
def test_a_run_says_how_far_it_is(
    comm: MPI.Intracomm,
    shared_path: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
    way: str,
    batch_norm: str,
) -> None:
    if name == "pyramid" and batch_norm == "step":
        pytest.skip("the run is refused: a norm of one average")
    run = run_of(shared_path, comm, name, batch_norm, **WAYS[way])
    assert train(run, comm=comm) == 0
    line = proof_in(said_of(capfd, comm))
    rows, cols = grid_of(comm)
    assert line.startswith(f"proved on {rows} × {cols} ranks, {run.halo_mode}")
    assert ("3 partitions, checkpointing always" in line) == (way == "pipeline")
    logits, gradients = line.split(": ")[1].split(";")[0].split(", ")
    assert float(logits.removeprefix("logits ")) < 1e-12
    assert float(gradients.removeprefix("gradients ")) < 1e-12
