"""The end of the job when a rank fails: no error of one rank leaves the others waiting."""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

from tilenet.errors import AgreedError, TilenetError
from tilenet.mpi import Intracomm

# MPICH's Abort may return, and any MPI's may hang on a broken network.
ABORT_SECONDS = 20.0


def run_as_rank(main: Callable[[], int]) -> int:
    """Run a rank's program such that no failure leaves other ranks waiting.

    An error that all ranks agreed on is printed once, and each rank returns 1. Anything else, on
    any rank and in any thread, prints its reason and ends the job on all ranks; so does
    `sys.exit(0)` on one of them, which would wait in MPI_Finalize for the others.
    Ctrl-C ends the job with exit code 130.
    """
    before, threading.excepthook = threading.excepthook, _report_in_thread
    try:
        return main()
    except BaseException as error:
        if isinstance(error, SystemExit | KeyboardInterrupt) and _world() is None:
            raise  # --help, mostly
        return _report(error)
    finally:
        threading.excepthook = before


def end_where_uncaught() -> None:
    """Have errors that a script does not catch on one of several ranks end all ranks from now on.

    An error that all ranks agreed on is printed once.
    """
    if _world() is not None and sys.excepthook is not _report_uncaught:
        sys.excepthook, threading.excepthook = _report_uncaught, _report_in_thread


def _report_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    _report(error.with_traceback(trace))  # Python then exits with 1


def _report(error: BaseException) -> int:
    """Print an error once if all ranks raise it, else end the job; return the exit code."""
    if isinstance(error, TilenetError):
        return _print_or_end(f"tilenet: {error}", alone=not isinstance(error, AgreedError))
    if isinstance(error, KeyboardInterrupt):
        _end_job("tilenet: stopped by Ctrl-C", 128 + signal.SIGINT)
    if isinstance(error, SystemExit):
        return _print_or_end(f"tilenet: stopped ({error.code})", alone=True)
    return _print_or_end("".join(traceback.format_exception(error)), alone=True)


def _report_in_thread(args: "threading.ExceptHookArgs") -> None:
    """End the job after an uncaught error in a thread: the rest would wait for its work."""
    if args.exc_value is None or args.exc_type is SystemExit:
        return
    name = args.thread.name if args.thread else "?"
    reason = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
    _end_job(f"thread {name}: {reason}")


def _world() -> Intracomm | None:
    """All ranks, if MPI runs with several."""
    if "mpi4py.MPI" not in sys.modules:
        return None
    from mpi4py import MPI

    return None if MPI.Is_finalized() or MPI.COMM_WORLD.size == 1 else MPI.COMM_WORLD


def _print_or_end(reason: str, *, alone: bool) -> int:
    """Print the reason once; where this rank is `alone` with it, end the job."""
    comm = _world()
    if alone and comm is not None:
        _end_job(reason)
    if comm is None or comm.rank == 0:
        print(reason, file=sys.stderr)
    return 1


def _end_job(reason: str, code: int = 1) -> NoReturn:
    """Print the reason, and end the job on all ranks."""
    try:
        try:
            # Not Python's timer: mpi4py holds the lock of the interpreter while it aborts.
            faulthandler.dump_traceback_later(ABORT_SECONDS, exit=True)
        except (RuntimeError, ValueError):  # stderr is closed
            devnull = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(ABORT_SECONDS, exit=True, file=devnull)
        comm = _world()
        prefix = "" if comm is None else f"[rank {comm.rank} of {comm.size}] "
        # Abort the other ranks even if this message cannot be printed: a launcher may not notice
        # by itself that a rank has ended (hydra, once in some hundred).
        with suppress(OSError, ValueError):
            print(f"{prefix}{reason}", file=sys.stderr, flush=True)
        if comm is not None:
            # mpiexec throws away output that it has not read when the abort arrives (MPICH 5.0.2's
            # hydra, 1 in 5)
            time.sleep(0.5)
            comm.Abort(code)
    finally:  # a second Ctrl-C, and MPICH's Abort, which may return
        os._exit(code)
