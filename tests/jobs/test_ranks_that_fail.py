"""A rank that fails ends the job on all ranks, at once, with its reason.

One rank in whatever way: slurm/test_slurm_failures.py, under mpiexec as under srun.
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

INTERRUPTED = """
import sys
from tilenet.parallel.ranks.abort import run_as_rank
from tilenet.parallel.ranks.comm import world

def program():
    world().Barrier()
    raise KeyboardInterrupt

sys.exit(run_as_rank(program))
"""


def test_ctrl_c_on_all_ranks_ends_with_130() -> None:
    ended = mpiexec(3, "-c", INTERRUPTED, limit_s=60)
    assert ended.returncode == 130
    assert " of 3] tilenet: stopped by Ctrl-C\n" in ended.stderr
    assert "Traceback" not in ended.stderr


STARTING = """
import os, sys, time
import tilenet.__main__ as program
from tilenet.parallel.ranks.abort import run_as_rank
from tilenet.parallel.ranks.comm import world

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
        from tilenet.parallel.ranks.comm import agreed, world
        from tilenet.parallel.ranks.abort import run_as_rank

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
