"""Killed jobs leave nothing in /dev/shm, and messages go on without the names of its files."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = textwrap.dedent("""
    import os, signal, sys
    from unittest.mock import MagicMock
    sys.modules["torch"] = MagicMock()  # which takes most of the time, and is not needed
    import numpy as np
    from mpi4py import MPI
    from tilenet.parallel.ranks.comm import world
    from tilenet.parallel.ranks.shared_memory import MAPS, NAMES

    lines = MAPS.read_text().splitlines()
    names = " ".join({found[0] for line in lines if (found := NAMES.search(line))})
    print("named", names, flush=True)
    comm = world()
    sums = np.full(1 << 20, 1.0 + comm.rank)
    comm.Allreduce(MPI.IN_PLACE, sums)
    other = comm.Dup()
    there, here = np.full(1 << 20, comm.rank), np.empty(1 << 20, int)
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    other.Sendrecv(there, after, recvbuf=here, source=before)
    other.Free()
    assert (sums == comm.size * (comm.size + 1) / 2).all()
    assert (here == before).all()
    comm.Barrier()
    print("worked", flush=True)
    comm.Barrier()
    if "killed" in sys.argv and comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if "killed" in sys.argv:
        signal.pause()
""")


@pytest.mark.parametrize(("size", "end"), [(1, "killed"), (3, "killed"), (3, "done")])
def test_a_job_leaves_no_shared_memory(size: int, end: str) -> None:
    ended = subprocess.run(
        ["mpiexec", "-n", str(size), sys.executable, "-c", PROGRAM, end],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.stdout.count("worked") == size, ended.stderr
    assert (ended.returncode == 0) == (end == "done"), ended.stderr
    names = {word for word in ended.stdout.split() if word.startswith("/dev/shm/")}
    if not names:
        pytest.skip("this MPI shares no file of that name")
    assert not [name for name in names if Path(name).exists()]
