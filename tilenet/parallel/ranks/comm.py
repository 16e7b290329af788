"""The ranks: the one door to MPI, agreement on errors, and the end of the job when a rank fails.

Rank and size come from MPI alone: in a batch script the environment's rank variables are those of
the script, not of the ranks that mpiexec starts there.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from tilenet.errors import AgreedError, TilenetError
from tilenet.parallel.ranks.shared_memory import unname_shared_memory
from tilenet.parallel.ranks.start import STEP_SIZES, say_started, watched_start

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "agreed", "end_where_uncaught", "run_as_rank", "threads_may_call", "wait_quietly", "world",
]  # fmt: skip

# MPICH's Abort may return, and any MPI's may hang on a broken network.
ABORT_SECONDS = 20.0
POLL_SECONDS = 0.02


def world() -> "MPI.Intracomm":
    """All ranks of the job; starts MPI on the first call. Collective.

    Raises:
        TilenetError: The launcher started several tasks, but MPI sees one: each would train alone.
    """
    with watched_start():
        from mpi4py import MPI  # not at the top: importing starts MPI, and planning must not

    if MPI.COMM_WORLD.size == 1:
        for name in STEP_SIZES:
            if os.environ.get(name, "1") not in ("", "1"):
                raise TilenetError(
                    f"MPI must see the ranks that the launcher starts ({name}: "
                    f"{os.environ[name]}, MPI: 1 rank); give srun the --mpi plug-in of this MPI "
                    "(--mpi=pmi2 for mpich, --mpi=pmix for Open MPI) or use the mpiexec that came "
                    "with it"
                )
    _begin_once()
    return MPI.COMM_WORLD


@cache
def _begin_once() -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 0:
        say_started()
    unname_shared_memory(MPI.COMM_WORLD)


def threads_may_call(comm: "MPI.Comm") -> bool:
    """Whether several threads of each rank may call MPI at a time. Collective."""
    from mpi4py import MPI

    return all(comm.allgather(MPI.Query_thread() >= MPI.THREAD_MULTIPLE))


@contextmanager
def agreed(comm: "MPI.Comm") -> Generator[None, None, None]:
    """Have all ranks raise what one of them raised. Collective at the end of the block.

    A rank that raised alone would leave the others waiting in their next message forever. The
    block itself must not communicate.

    Raises:
        AgreedError: On every rank, in the words of the lowest rank that raised one.
    """
    error: TilenetError | None = None
    try:
        yield
    except TilenetError as raised:
        error = raised
    # Ranks that wait in mpi4py's allreduce keep the interpreter locked: a watchdog could not speak.
    lowest = min(comm.allgather(comm.rank if error else comm.size))
    if lowest < comm.size:
        raise AgreedError(comm.bcast(str(error), root=lowest)) from error


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
        if isinstance(error, SystemExit | KeyboardInterrupt) and not _has_several_ranks():
            raise  # --help, mostly
        return _report(error)
    finally:
        threading.excepthook = before


def end_where_uncaught() -> None:
    """From now on an error that a script does not catch on one of several ranks ends all.

    An error that all ranks agreed on is printed once.
    """
    if _has_several_ranks() and sys.excepthook is not _report_uncaught:
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


def _has_several_ranks() -> bool:
    """Whether MPI runs, with several ranks."""
    if "mpi4py.MPI" not in sys.modules:
        return False
    from mpi4py import MPI

    return not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1


def _print_or_end(reason: str, *, alone: bool) -> int:
    """Print the reason once; where this rank is `alone` with it, end the job."""
    if alone and _has_several_ranks():
        _end_job(reason)
    if not _has_several_ranks() or world().rank == 0:
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
        prefix = ""
        if _has_several_ranks():
            from mpi4py import MPI

            prefix = f"[rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}] "
        # Abort the other ranks even if this message cannot be printed: a launcher may not notice
        # by itself that a rank has ended (hydra, once in some hundred).
        with suppress(OSError, ValueError):
            print(f"{prefix}{reason}", file=sys.stderr, flush=True)
        if prefix:
            # mpiexec throws away what it has not read when the abort arrives (MPICH 5.0.2's hydra,
            # 1 in 5)
            time.sleep(0.5)
            MPI.COMM_WORLD.Abort(code)
    finally:  # a second Ctrl-C, and MPICH's Abort, which may return
        os._exit(code)


def wait_quietly(comm: "MPI.Comm") -> None:
    """A barrier that sleeps between polls. Collective.

    MPI's own polls without a pause, and where ranks share cores it takes the core of the rank that
    all wait for.
    """
    barrier = comm.Ibarrier()
    while not barrier.Test():
        time.sleep(POLL_SECONDS)
