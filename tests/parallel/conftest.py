"""Every test here runs on all ranks of the job; files that tests share are written by rank 0."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from mpi4py import MPI


def pytest_report_header() -> str:
    return f"{MPI.Get_library_version().splitlines()[0]}, {MPI.COMM_WORLD.size} ranks"


@pytest.fixture
def comm() -> Iterator[MPI.Intracomm]:
    """All ranks; no test begins before all have ended the one before."""
    MPI.COMM_WORLD.Barrier()
    yield MPI.COMM_WORLD
    MPI.COMM_WORLD.Barrier()


@pytest.fixture
def shared_path(comm: MPI.Intracomm) -> Iterator[Path]:
    """An empty folder that all ranks see."""
    path = Path(comm.bcast(tempfile.mkdtemp(prefix="tilenet-") if comm.rank == 0 else None))
    yield path
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(path)
