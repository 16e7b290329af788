"""A scene that all ranks of a test of the library see."""

from pathlib import Path

import pytest
from mpi4py import MPI
from scenes import write_scene


@pytest.fixture
def scene(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """i.tif and l.tif in the working directory."""
    comm = MPI.COMM_WORLD
    if comm.rank == 0:
        write_scene(shared_path)
    comm.Barrier()
    monkeypatch.chdir(shared_path)
    return shared_path
