"""A rank that hangs shows where, on all ranks, and ends the job."""

import re
import subprocess
import sys
import textwrap

import pytest

LIMIT_S = 120  # it takes 4


@pytest.mark.parametrize(
    ("size", "fault", "where"),
    [
        (1, "time.sleep(1000)", "in rest"),
        (1, "threading.Event().wait()", "threading.py"),
        # Without letting other threads of the process run.
        (1, "lock(mutex), lock(mutex)", "in rest"),
        (3, "lock(mutex), lock(mutex)", "in rest"),
    ],
    ids=["sleeps", "waits", "keeps the interpreter", "keeps the interpreter, others wait"],
)
def test_a_rank_that_hangs_shows_where_and_the_job_ends(size: int, fault: str, where: str) -> None:
    program = textwrap.dedent(f"""
        import ctypes, sys, threading, time
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
                comm.allreduce(1)
            return 0

        sys.exit(run_as_rank(program))
    """)
    ended = subprocess.run(
        ["mpiexec", "-n", str(size), sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode != 0
    for rank in range(size):
        mark = re.escape(f"[rank {rank} of {size}] ")
        lines = "\n".join(re.findall(f"^{mark}(.*)", ended.stderr, re.MULTILINE))
        assert lines.startswith("tilenet: step 5 must end within 1 s;"), ended.stderr
        assert " in program\n" in lines
        assert (where in lines) == (rank == size - 1)
