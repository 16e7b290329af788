"""A rank that hangs shows where, on all ranks, and ends the job.

That the others wait for it, in buffers or with the interpreter: slurm/test_slurm_failures.py.
"""

import re
import textwrap

import pytest
from launched import mpiexec

pytestmark = pytest.mark.alone

LIMIT_S = 120  # it takes 4
SENTENCE = (
    "tilenet: step 5 must end within 1 s; the stacks show where it hangs, or what is slow: then "
    "raise hang_seconds\n"
)
KEEPS = "lock(mutex), lock(mutex)"  # without letting other threads of the process run
PROGRAM = """
    import ctypes, os, signal, sys, threading, time
    from unittest.mock import MagicMock
    sys.modules["torch"] = MagicMock()  # which takes most of the time, and is not needed
    from tilenet.parallel.ranks.comm import run_as_rank, world
    from tilenet.parallel.health.watchdog import Watchdog

    lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)

    def rest():
        {fault}

    def program():
        comm = world()
        with Watchdog(1.0, f"rank {{comm.rank}} of {{comm.size}}") as watchdog:
            comm.Barrier()
            for step in range(5):
                watchdog.arm(f"step {{step}}")
                comm.allreduce(1)
            watchdog.arm("step 5")
            if comm.rank == comm.size - 1:
                rest()
            comm.allgather(1)
        return 0

    sys.exit(run_as_rank(program))
"""


def hang(size: int, fault: str) -> str:
    """What a job says whose last rank hangs."""
    program = textwrap.dedent(PROGRAM).format(fault=fault)
    ended = mpiexec(size, "-c", program, limit_s=LIMIT_S)
    assert ended.returncode != 0
    return ended.stderr


def lines_of(said: str, rank: int, size: int) -> str:
    return "".join(re.findall(rf"^\[rank {rank} of {size}\] (.*\n)", said, re.MULTILINE))


@pytest.mark.parametrize(
    ("fault", "where"),
    [("time.sleep(1000)", "in rest\n"), ("threading.Event().wait()", "threading.py")],
    ids=["sleeps", "waits"],
)
def test_a_rank_that_hangs_shows_where_and_the_job_ends(fault: str, where: str) -> None:
    lines = lines_of(hang(1, fault), 0, 1)
    assert lines.startswith(SENTENCE)
    assert " in program\n" in lines
    assert where in lines


@pytest.mark.parametrize("size", [1, 3])
def test_a_rank_that_keeps_the_interpreter_shows_it_in_its_stacks(size: int) -> None:
    said = hang(size, KEEPS)
    assert f" in [rank {size - 1} of {size}] {SENTENCE}" in said
    assert " in rest\n" in said
    for rank in range(size - 1):
        lines = lines_of(said, rank, size)
        assert lines.startswith(SENTENCE), said
        assert " in program\n" in lines


def test_a_rank_that_was_stopped_is_ended_by_the_others() -> None:
    said = hang(2, "os.kill(os.getpid(), signal.SIGSTOP)")
    assert lines_of(said, 0, 2).startswith(SENTENCE), said
    assert "rank 1 of 2" not in said
