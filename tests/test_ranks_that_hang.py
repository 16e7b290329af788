"""A rank that hangs shows where, on all ranks, and ends the job."""

import subprocess
import sys
import textwrap
import time

import pytest


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("time.sleep(1000)", "in rest"),
        # Without letting other threads of the process run, the watchdog's among them.
        ("ctypes.PyDLL(None).sleep(1000)", "in rest"),
        ("threading.Event().wait()", "threading.py"),
    ],
    ids=["sleeps", "sleeps with the lock", "waits"],
)
def test_a_rank_that_hangs_shows_where_and_the_job_ends(size: int, fault: str, where: str) -> None:
    program = textwrap.dedent(f"""
        import ctypes, sys, threading, time
        from tilenet.parallel.mesh import run_as_rank, world
        from tilenet.parallel.watchdog import Watchdog

        def rest():
            {fault}

        def program():
            comm = world()
            with Watchdog(1.0, f"rank {{comm.rank}} of {{comm.size}}") as watchdog:
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
    began = time.monotonic()
    ended = subprocess.run(
        ["mpiexec", "-n", str(size), sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode != 0
    assert where in ended.stderr
    for rank in range(size - 1):
        said = f"[rank {rank} of {size}] tilenet: step 5 must end within 1 s"
        assert said in ended.stderr
    assert ended.stderr.count(" in program") >= size  # once in each rank's stack
    assert time.monotonic() - began < 50
