"""MPI's start under a watchdog: a rank whose peers never come would wait in MPI_Init forever.

Seen on Slurm, where its PMI2 plug-in lost the first messages of a rank. The run file is not read
yet, and ranks have no numbers but those of their launcher.

Ctrl-C: one line that says what is kept and how to go on, exit code 130, and no traceback.

Where a launcher passes Ctrl-C on, each rank gets it. Rank 0 speaks for all; another rank waits
until rank 0 has ended the job, and speaks itself where that does not happen.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from tilenet.errors import TilenetError, one_line
from tilenet.parallel.health.watchdog import Watchdog

__all__ = [
    "INTERRUPTED",
    "STEP_SIZES",
    "CtrlC",
    "end_at_once",
    "heard_in_c",
    "kept_on_ctrl_c",
    "launched",
    "say_started",
    "say_stopped",
    "stopped_by",
    "task_number",
    "wait_for_first",
    "watched_start",
]

# Task counts that launchers leave in the environment of each task, and the task's number.
STEP_SIZES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE")
NUMBERS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "SLURM_PROCID")

# Ranks that read Python's modules from a file system with much to do come minutes apart.
PATIENCE = "TILENET_START_SECONDS"
START_SECONDS = 1800.0
STARTED = "TILENET_STARTED"


def launched() -> bool:
    """Whether a launcher started several tasks, as far as the environment tells; no MPI yet."""
    return any(os.environ.get(name, "1") not in ("", "1") for name in STEP_SIZES)


def task_number() -> int | None:
    """This task's number, as its launcher says it; None: it says none. No MPI yet."""
    given = (os.environ[name] for name in NUMBERS if name in os.environ)
    return next((int(text) for text in given if text.isdecimal()), None)


@contextmanager
def watched_start() -> Generator[None, None, None]:
    """Have the block, which starts MPI, end within TILENET_START_SECONDS; 0: however long it takes.

    Raises:
        TilenetError: The variable is no such number.
    """
    if "mpi4py.MPI" in sys.modules or not launched():
        yield
        return
    number = task_number()
    who = f"rank {'?' if number is None else number}, before MPI's start"
    with Watchdog(_patience(), who, PATIENCE) as watchdog:
        watchdog.arm("MPI_Init, for which all ranks must come,")
        yield


def say_started() -> None:
    """Make the empty file that TILENET_STARTED names: job scripts start a step again without it."""
    if name := os.environ.get(STARTED):
        with suppress(OSError):  # a full disk; the run itself will say so
            Path(name).touch()


def _patience() -> float:
    text = os.environ.get(PATIENCE, str(START_SECONDS))
    try:
        return float(text)
    except ValueError as error:
        raise TilenetError(
            f"{PATIENCE} must be a number of seconds (got {text!r}); {START_SECONDS:g} is usual, 0 "
            "switches this watchdog off"
        ) from error


INTERRUPTED = 128 + signal.SIGINT.value  # exit code, as shells have it
NOTHING = "nothing was written: give the same command again"

# How long a rank leaves the word to rank 0, which needs half a second to end the job.
WAIT_SECONDS = 2.0


class CtrlC(KeyboardInterrupt):
    """Ctrl-C, with what is kept of the work and how to go on with it."""


@contextmanager
def kept_on_ctrl_c(words: Callable[[], str]) -> Generator[None, None, None]:
    """Have Ctrl-C in the block raise `CtrlC` with those words, taken when the block has ended.

    Raises:
        CtrlC: Ctrl-C was pressed.
    """
    try:
        yield
    except CtrlC:
        raise
    except KeyboardInterrupt as stop:
        raise CtrlC(words()) from stop


def stopped_by(error: BaseException) -> str | None:
    """What to say if an error is Ctrl-C or came of it, as an import that was interrupted; or None.

    C code may turn Python's KeyboardInterrupt into an error of its own.
    """
    found, seen = False, set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, CtrlC):
            return _sentence(str(one))
        found = found or isinstance(one, KeyboardInterrupt)
        waiting += [one.__cause__, one.__context__]
    return _sentence(NOTHING) if found else None


@contextmanager
def end_at_once() -> Generator[None, None, None]:
    """Have Ctrl-C in the block end the process: while modules are imported nothing is to be saved.

    Modules in C that are interrupted in their start raise errors of all kinds, or abort.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # a job in the background, which Ctrl-C is not meant for, or a program around this
        return
    signal.signal(signal.SIGINT, _ended)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def heard_in_c() -> Generator[None, None, None]:
    """Have Ctrl-C in the block, MPI's start, end a rank at once, although it is in C code.

    Python's own handlers run when that returns: when all ranks have come, of which those that
    still import have ended.
    """
    before = signal.getsignal(signal.SIGINT)
    if (
        before is not signal.default_int_handler
        or threading.current_thread() is not threading.main_thread()
        or task_number() is None
        or "mpi4py.MPI" in sys.modules
    ):
        yield
        return
    import ctypes  # for jobs of several ranks alone

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: _ended(number, None))
    ctypes.CDLL(None).signal(signal.SIGINT.value, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def say_stopped(words: str) -> int:
    """Say it, on the first rank; returns the exit code.

    What Python still does until it ends, another Ctrl-C cuts short.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    # Without MPI: launchers may leave each rank to end by itself, and all of them would say it.
    number = task_number()
    wait_for_first(number)
    if not number:
        with suppress(OSError, ValueError):
            print(words, file=sys.stderr, flush=True)
    return INTERRUPTED


def wait_for_first(rank: int | None) -> None:
    """Leave the word to rank 0. None: this process is the only one."""
    if rank:
        time.sleep(WAIT_SECONDS)


def _ended(number: int, frame: FrameType | None) -> None:
    os._exit(say_stopped(_sentence(NOTHING)))


def _sentence(words: str) -> str:
    return one_line(f"tilenet: stopped by Ctrl-C; {words}")
