"""The ranks: the one door to MPI, agreement on errors, and the end of the job when a rank fails.

Rank and size come from MPI alone: in a batch script the environment's rank variables are those of
the script, not of the ranks that mpiexec starts there.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tilenet.errors import AgreedError, TilenetError
from tilenet.parallel.heap import keep_freed_buffers

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["NodePlace", "agreed", "choose_devices", "node_place", "run_as_rank", "world"]

# Task counts that launchers leave in the environment of each task.
STEP_SIZES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE")

# By which launchers show a rank some of a node's GPUs.
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def world() -> "MPI.Intracomm":
    """All ranks of the job; starts MPI on the first call. Collective.

    Raises:
        TilenetError: The launcher started several tasks, but MPI sees one: each would train alone.
    """
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
    return MPI.COMM_WORLD


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
        own_devices: Whether the launcher shows each of them other GPUs than the rest.
    """

    rank: int
    size: int
    own_devices: bool = False


def node_place(comm: "MPI.Comm") -> NodePlace:
    """Where this rank stands on its node. Collective."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    shown = node.allgather([os.environ.get(name) for name in VISIBLE_DEVICES])
    distinct = len({str(names) for names in shown}) == node.size
    place = NodePlace(node.rank, node.size, own_devices=node.size > 1 and distinct)
    node.Free()
    return place


def choose_devices(
    asked: str | list[str], place: NodePlace, num_partitions: int = 1
) -> tuple[torch.device, ...]:
    """The devices of a rank, one per partition.

    Args:
        asked: `auto`, `cpu`, or `cuda` (ROCm too), by the rank's number on its node; or the
            devices themselves, one per partition, of which one may be named several times. Each
            rank takes all that are named, so that several ranks of a node need one launcher that
            shows each of them its own.

    Raises:
        TilenetError: There are fewer devices on the node than its ranks need, ranks would share
            one by accident, or a name is none.
    """
    if isinstance(asked, list):
        return _use(_named(asked, place), place)
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return _use((torch.device("cpu"),) * num_partitions, place)
    count = torch.cuda.device_count()
    ranks = 1 if place.own_devices else place.size
    if count < ranks * num_partitions:
        raise TilenetError(
            f"each partition of each rank needs a device of its own (ranks on this node: {ranks}, "
            f"partitions: {num_partitions}, devices that torch sees: {count}); start fewer ranks "
            "per node, take fewer partitions or set device: cpu"
        )
    first = 0 if place.own_devices else place.rank * num_partitions
    return _use(tuple(torch.device("cuda", first + j) for j in range(num_partitions)), place)


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
    any rank, prints its reason and ends the job on all ranks.
    """
    try:
        return main()
    except TilenetError as error:
        return _fail(f"tilenet: {error}", alone=not isinstance(error, AgreedError))
    except SystemExit as stop:
        if stop.code in (None, 0) or "mpi4py.MPI" not in sys.modules:
            raise
        return _fail(f"tilenet: stopped ({stop.code})", alone=True)
    except BaseException:
        return _fail(traceback.format_exc(), alone=True)


def _fail(reason: str, *, alone: bool) -> int:
    if "mpi4py.MPI" not in sys.modules:
        print(reason, file=sys.stderr)
        return 1
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    if not alone or size == 1:
        if rank == 0:
            print(reason, file=sys.stderr)
        return 1
    print(f"[rank {rank} of {size}] {reason}", file=sys.stderr, flush=True)
    # mpiexec throws away what it has not read when the abort arrives (MPICH 5.0.2's hydra, 1 in 5)
    time.sleep(0.5)
    MPI.COMM_WORLD.Abort(1)
    os._exit(1)  # MPICH's Abort may return, and this rank would go on communicating
