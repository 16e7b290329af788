"""The ranks: the one door to MPI, agreement on errors, and the end of the job when a rank fails.

Rank and size come from MPI alone: in a batch script the environment's rank variables are those of
the script, not of the ranks that mpiexec starts there.
"""

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NoReturn

import torch

from tilenet.errors import AgreedError, TilenetError
from tilenet.parallel.ctrl_c import INTERRUPTED, heard_in_c, stopped_by, wait_for_first
from tilenet.parallel.gpu_shares import share_gpus, visible_gpus
from tilenet.parallel.heap import keep_freed_buffers
from tilenet.parallel.shared_memory import unname_shared_memory
from tilenet.parallel.start import STEP_SIZES, launched, say_started, watched_start

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "NodePlace",
    "agreed",
    "choose_devices",
    "launched",
    "node_place",
    "run_as_rank",
    "world",
]

# MPICH's Abort may return, and any may hang on a broken network.
ABORT_SECONDS = 20.0


def world() -> "MPI.Intracomm":
    """All ranks of the job; starts MPI on the first call. Collective.

    Raises:
        TilenetError: The launcher started several tasks, but MPI sees one: each would train alone.
    """
    with watched_start(), heard_in_c():
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


@contextmanager
def agreed(comm: "MPI.Comm") -> Generator[None, None, None]:
    """Have all ranks raise what one of them raised. Collective at the end of the block.

    A rank that raised alone would leave the others waiting in their next message for ever. The
    block itself must not communicate.

    Raises:
        AgreedError: On every rank, in the words of the lowest rank that raised one.
    """
    error: TilenetError | None = None
    try:
        yield
    except TilenetError as raised:
        error = raised
    first = comm.allreduce(comm.rank if error else comm.size, op=_min())
    if first < comm.size:
        sentence = comm.bcast(str(error), root=first)
        raise AgreedError(sentence) from error


def _min() -> "MPI.Op":
    from mpi4py import MPI

    return MPI.MIN


@dataclass(frozen=True)
class NodePlace:
    """Where a rank stands on its node.

    Attributes:
        rank: Its number there.
        size: Ranks there.
        shown: Names of the GPUs that each of them sees; empty: all see what this one sees.
    """

    rank: int
    size: int
    shown: tuple[tuple[str, ...], ...] = ()

    @property
    def own_devices(self) -> bool:
        """Whether the launcher shows each rank GPUs that no other rank sees."""
        seen = [name for names in self.shown for name in names]
        return all(self.shown) and 0 < len(seen) == len(set(seen)) and self.size > 1


def node_place(comm: "MPI.Comm", asked: str | list[str] = "cpu") -> NodePlace:
    """Where this rank stands on its node; which GPUs are there, if it asked for any. Collective."""
    from mpi4py import MPI

    # Only if asked for: to look at GPUs starts CUDA.
    seen = () if asked == "cpu" else visible_gpus()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    place = NodePlace(node.rank, node.size, tuple(node.allgather(seen)))
    node.Free()
    return place


def choose_devices(
    asked: str | list[str], place: NodePlace, num_partitions: int = 1
) -> tuple[torch.device, ...]:
    """The devices of a rank, one per partition.

    Args:
        asked: `auto`, `cpu`, or `cuda` (ROCm too), of which each rank of a node takes its share;
            or the devices themselves, one per partition, of which one may be named several times.
            Each rank takes all that are named, so that several ranks of a node need one launcher
            that shows each of them its own.

    Raises:
        TilenetError: There are fewer devices on the node than its ranks need, ranks would share
            one by accident, or a name is none.
    """
    if isinstance(asked, list):
        return _use(_named(asked, place), place)
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return _use((torch.device("cpu"),) * num_partitions, place)
    here = tuple(str(number) for number in range(torch.cuda.device_count()))
    numbers = share_gpus(place.shown or (here,) * place.size, num_partitions)[place.rank]
    return _use(tuple(torch.device("cuda", number) for number in numbers), place)


def _named(names: list[str], place: NodePlace) -> tuple[torch.device, ...]:
    devices = []
    for name in names:
        try:
            device = torch.device(name)
        except RuntimeError:
            device = torch.device("meta")
        count = torch.cuda.device_count() if device.type == "cuda" else 1
        if device.type not in ("cpu", "cuda") or (device.index or 0) >= count:
            raise TilenetError(
                f"a device is cpu or cuda:<number> (device: {name}, cuda devices that torch sees: "
                f"{torch.cuda.device_count()}); name others"
            )
        devices.append(torch.device("cuda", device.index or 0) if device.type == "cuda" else device)
    if len({device.type for device in devices}) > 1:
        raise TilenetError(
            f"a rank's devices are of one type (device: {names}); name either cpu or cuda devices"
        )
    if devices[0].type == "cuda" and place.size > 1 and not place.own_devices:
        raise TilenetError(
            f"devices that are named belong to one rank (ranks on this node: {place.size}, device: "
            f"{names}); set device: cuda, which gives each rank its own, or start one rank per node"
        )
    return tuple(devices)


def _use(devices: tuple[torch.device, ...], place: NodePlace) -> tuple[torch.device, ...]:
    if devices[0].type == "cpu":
        if "OMP_NUM_THREADS" not in os.environ:
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(max(1, cores // place.size))
        keep_freed_buffers()
    else:
        # Before any other call: a stray context would sit on device 0.
        torch.cuda.set_device(devices[0])
    return devices


def run_as_rank(main: Callable[[], int]) -> int:
    """Run a rank's program such that no failure leaves other ranks waiting.

    An error that all ranks agreed on is printed once, and each rank returns 1. Anything else, on
    any rank and in any thread, prints its reason and ends the job on all ranks. So does a rank that
    exits with 0 in between: it would wait in MPI_Finalize for ranks that wait for its messages.
    Ctrl-C ends it with exit code 130.
    """
    before, threading.excepthook = threading.excepthook, _thread_failed
    try:
        return main()
    except BaseException as error:
        if words := stopped_by(error):
            if not _several():
                raise  # the command line says it
            _end(words, INTERRUPTED)
        if isinstance(error, TilenetError):
            return _fail(f"tilenet: {error}", alone=not isinstance(error, AgreedError))
        if isinstance(error, SystemExit):
            if not _several():
                raise  # --help, mostly
            return _fail(f"tilenet: stopped ({error.code})", alone=True)
        return _fail(traceback.format_exc(), alone=True)
    finally:
        threading.excepthook = before


def _thread_failed(args: "threading.ExceptHookArgs") -> None:
    """A thread died of an error that nobody caught: the rest would wait for what it had to do."""
    if args.exc_value is None or args.exc_type is SystemExit:
        return
    name = args.thread.name if args.thread else "?"
    reason = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
    _end(f"thread {name}: {reason}")


def _several() -> bool:
    """Whether MPI runs, with several ranks."""
    if "mpi4py.MPI" not in sys.modules:
        return False
    from mpi4py import MPI

    return not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1


def _fail(reason: str, *, alone: bool) -> int:
    if alone and _several():
        _end(reason)
    if not _several() or world().rank == 0:
        print(reason, file=sys.stderr)
    return 1


def _end(reason: str, code: int = 1) -> NoReturn:
    """Say why, and end the job on all ranks."""
    try:
        try:
            # Not Python's timer: mpi4py holds the lock of the interpreter while it aborts.
            faulthandler.dump_traceback_later(ABORT_SECONDS, exit=True)
        except (RuntimeError, ValueError):  # stderr is closed
            nowhere = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(ABORT_SECONDS, exit=True, file=nowhere)
        who = ""
        if _several():
            from mpi4py import MPI

            who = f"[rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}] "
            if code == INTERRUPTED:
                wait_for_first(MPI.COMM_WORLD.rank)
        # Who cannot say why must end the others all the same: a launcher may not notice by itself
        # (hydra, once in some hundred).
        with suppress(OSError, ValueError):
            print(f"{who}{reason}", file=sys.stderr, flush=True)
        if who:
            # mpiexec throws away what it has not read when the abort arrives (MPICH 5.0.2's hydra,
            # 1 in 5)
            time.sleep(0.5)
            MPI.COMM_WORLD.Abort(code)
    finally:  # a second Ctrl-C, and MPICH's Abort, which may return
        os._exit(code)
