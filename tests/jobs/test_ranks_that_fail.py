"""A rank that fails ends the job on all ranks, at once, with its reason.

Exit codes, signals and plain bugs: slurm/test_slurm_failures.py, under mpiexec as under srun.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress

import pytest
from launched import mpiexec

pytestmark = pytest.mark.alone

PROGRAM = """
import ctypes, os, signal, sys, threading
from mpi4py import MPI
from tilenet.errors import TilenetError
from tilenet.parallel.ranks.comm import run_as_rank, world

def program():
    comm = world()
    comm.Barrier()
    if comm.rank == 1:
        {fault}
    for _ in range(1000):
        comm.allreduce(1)
    comm.Recv(bytearray(1), source=(comm.rank + 1) % comm.size, tag=9)
    return 0

sys.exit(run_as_rank(program))
"""


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise TilenetError('the disk is full')", "[rank 1 of 3] tilenet: the disk is full"),
        ("raise KeyboardInterrupt", "[rank 1 of 3] tilenet: stopped by Ctrl-C"),
        ("sys.stderr.close(); 1 / 0", ""),
        ("threading.Thread(target=lambda: 1 / 0, name='adder').start()", "3] thread adder: Trace"),
    ],
    ids=["error", "interrupt", "closed stderr", "thread"],
)
def test_the_job_ends(fault: str, reason: str) -> None:
    program = textwrap.dedent(PROGRAM).format(fault=fault)
    began = time.monotonic()
    ended = mpiexec(3, "-c", program, limit_s=60)
    assert ended.returncode != 0
    assert reason in ended.stderr
    assert time.monotonic() - began < 50  # the ranks that did not fail wait forever


def test_ctrl_c_on_all_ranks_ends_with_130() -> None:
    program = textwrap.dedent(PROGRAM).replace("if comm.rank == 1:", "if True:")
    ended = mpiexec(3, "-c", program.format(fault="raise KeyboardInterrupt"), limit_s=60)
    assert ended.returncode == 130
    assert " of 3] tilenet: stopped by Ctrl-C\n" in ended.stderr
    assert "Traceback" not in ended.stderr


STARTING = """
import os, sys, time
import tilenet.__main__ as program
from tilenet.parallel.ranks.comm import run_as_rank, world

class Command:
    def main(arguments):
        return run_as_rank(start)

def start():
    if os.environ["PMI_RANK"] == "1":
        time.sleep(60)
    sys.stderr.write("starts\\n")  # in one write: the other rank's line may come between two
    return world().size

program.import_module = lambda name: Command
sys.exit(program.main(["train"]))
"""


def test_ctrl_c_while_mpi_starts_leaves_no_rank_that_waits_for_the_others() -> None:
    """Two ranks of three are in MPI_Init, in C code, where Python hears of no signal."""
    command = ["mpiexec", "-n", "3", sys.executable, "-c", STARTING]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert job.stderr is not None
    try:
        assert [job.stderr.readline() for _ in range(2)] == ["starts\n"] * 2
        time.sleep(0.5)  # they say so just before
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=30)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode != 0


def test_an_agreed_error_is_said_once_and_ends_with_1() -> None:
    program = textwrap.dedent("""
        import sys
        from tilenet.errors import TilenetError
        from tilenet.parallel.ranks.comm import agreed, run_as_rank, world

        def program():
            comm = world()
            with agreed(comm):
                if comm.rank == 2:
                    raise TilenetError("no such file")
            return 0

        sys.exit(run_as_rank(program))
    """)
    ended = mpiexec(3, "-c", program, limit_s=60)
    assert (ended.returncode, ended.stderr) == (1, "tilenet: no such file\n")
