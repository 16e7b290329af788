"""A job of which rank 2 fails: failing_rank.py FAULT FILE. FILE gets the moment of the fault."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

HANG_S = 1
SKEW_S = 0.25  # between the ranks' watchdogs, so that the first must leave the others time


def fail(error: BaseException) -> None:
    raise error


def hang() -> None:
    time.sleep(1000)


def lock() -> None:
    """Wait for ever without letting other threads of the process run."""
    twice, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    twice(mutex)
    twice(mutex)


def fail_in_thread() -> None:
    threading.Thread(target=fail, args=[RuntimeError("boom")], name="adder").start()
    hang()


def fail_without_words() -> None:
    sys.stderr.close()
    fail(RuntimeError("boom"))


FAULTS: dict[str, Callable[[], object]] = {
    "exception": lambda: fail(RuntimeError("boom")),
    "sys.exit(3)": lambda: sys.exit(3),
    "sys.exit(0)": lambda: sys.exit(0),
    "os._exit(4)": lambda: os._exit(4),
    "os._exit(0)": lambda: os._exit(0),
    "kill -9": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": hang,
    "hang, buffers": hang,
}
# Those of which a launcher sees nothing new.
OTHERS: dict[str, Callable[[], object]] = {
    "error": lambda: fail(TilenetError("the disk is full")),
    "interrupt": lambda: fail(KeyboardInterrupt()),
    "closed stderr": fail_without_words,
    "thread": fail_in_thread,
    "hang, buffers, locked": lock,
    "hang, buffers, SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def wait_for_the_others(pickled: bool) -> None:
    # The first keeps the interpreter locked while it waits, the second does not.
    if pickled:
        world().allreduce(1)
    else:
        world().Allreduce(bytearray(8), bytearray(8))


def program() -> int:
    comm = world()
    # Where it should not be needed it must not help.
    hang_s = HANG_S if sys.argv[1].startswith(("hang", "os._exit(0)")) else 1000
    with Watchdog(hang_s, f"rank {comm.rank} of {comm.size}") as watchdog:
        comm.Barrier()
        if sys.argv[1].startswith("hang"):
            time.sleep(comm.rank * SKEW_S)
        watchdog.arm("the sum")
        if comm.rank == 2:
            Path(sys.argv[2]).write_text(repr(time.time()))
            (FAULTS | OTHERS)[sys.argv[1]]()
        wait_for_the_others(pickled="buffers" not in sys.argv[1])
    return 0


if __name__ == "__main__":
    sys.modules["torch"] = MagicMock()  # the guard needs none, and it takes most of the time
    from tilenet.errors import TilenetError
    from tilenet.parallel.health.watchdog import Watchdog
    from tilenet.parallel.ranks.abort import run_as_rank
    from tilenet.parallel.ranks.comm import world

    sys.exit(run_as_rank(program))
