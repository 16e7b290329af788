"""A job of which rank 2 fails: failing_rank.py FAULT FILE. FILE gets the moment of the fault."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tilenet.parallel.mesh import run_as_rank, world
from tilenet.parallel.watchdog import Watchdog

HANG_S = 2


def fail() -> None:
    raise RuntimeError("boom")


def hang() -> None:
    time.sleep(1000)


FAULTS: dict[str, Callable[[], object]] = {
    "exception": fail,
    "sys.exit(3)": lambda: sys.exit(3),
    "sys.exit(0)": lambda: sys.exit(0),
    "os._exit(4)": lambda: os._exit(4),
    "kill -9": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": hang,
}


def program() -> int:
    comm = world()
    comm.Barrier()
    with Watchdog(HANG_S, f"rank {comm.rank} of {comm.size}") as watchdog:
        watchdog.arm("the sum")
        if comm.rank == 2:
            Path(sys.argv[2]).write_text(repr(time.time()))
            FAULTS[sys.argv[1]]()
        comm.allreduce(1)  # the others wait here
    return 0


if __name__ == "__main__":
    sys.exit(run_as_rank(program))
