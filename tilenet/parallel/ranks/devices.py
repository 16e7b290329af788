"""Which devices each rank of a node takes, decided from what each of them sees.

Launchers differ: some show every rank all GPUs of its node, some show each rank its own, jsrun
shows those of a resource set to all ranks in it. One rule covers them: ranks that see the same GPUs
deal them out among themselves. It needs names that do not depend on who looks, because a launcher
that hides GPUs also renumbers them.
"""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tilenet.errors import TilenetError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "NodePlace",
    "choose_devices",
    "keep_freed_buffers",
    "node_place",
    "share_gpus",
    "visible_gpus",
]

# By which launchers show a rank some of a node's GPUs.
VISIBLE_DEVICES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def share_gpus(shown: Sequence[Sequence[str]], num_partitions: int) -> tuple[tuple[int, ...], ...]:
    """The GPUs of each rank of a node, by the numbers that they have for that rank.

    Args:
        shown: Names of the GPUs that each rank sees, in its order.
        num_partitions: How many each takes.

    Raises:
        TilenetError: There are too few, or two ranks would share one.
    """
    chosen = []
    for rank, seen in enumerate(shown):
        peers = [other for other, theirs in enumerate(shown) if set(theirs) == set(seen)]
        if len(seen) < num_partitions * len(peers):
            same = f"ranks that see the same: {len(peers)}, " * (len(peers) < len(shown))
            raise TilenetError(
                f"each partition of each rank needs a device of its own (ranks on this node: "
                f"{len(shown)}, {same}partitions: {num_partitions}, devices that torch sees: "
                f"{len(seen)}); start fewer ranks per node, take fewer partitions, show each rank "
                "all GPUs of its node (srun --gpu-bind=none, jsrun -r 1) or set device: cpu"
            )
        first = peers.index(rank) * num_partitions
        # In the order of one of them: each may see the same GPUs in another.
        names = shown[peers[0]][first : first + num_partitions]
        chosen.append(tuple(seen.index(name) for name in names))
    owners: dict[str, int] = {}
    for rank, numbers in enumerate(chosen):
        for name in (shown[rank][number] for number in numbers):
            if owners.setdefault(name, rank) != rank:
                raise TilenetError(
                    f"two ranks may not use one device (ranks {owners[name]} and {rank} of this "
                    f"node, GPU {name}); show each rank all GPUs of its node (srun "
                    "--gpu-bind=none, jsrun -r 1) or none that another sees"
                )
    return tuple(chosen)


def visible_gpus() -> tuple[str, ...]:
    """Names of the GPUs that this rank sees, by number; the same on all ranks of the node."""
    if not torch.cuda.is_available():
        return ()
    shown = next((os.environ[name] for name in VISIBLE_DEVICES if os.environ.get(name)), "")
    entries = dict(enumerate(shown.split(",") if shown else ()))
    names: list[str] = []
    for number in range(torch.cuda.device_count()):
        name = _name(number, entries.get(number, str(number)))
        names.append(name if name not in names else f"{name} #{number}")
    return tuple(names)


def _name(number: int, entry: str) -> str:
    if entry.startswith("MIG-"):  # slices of a GPU have its UUID
        return entry
    found = torch.cuda.get_device_properties(number)
    uuid = str(getattr(found, "uuid", ""))  # some ROCm releases leave it zero
    if uuid.strip("0-"):
        return uuid
    bus = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in bus and any(bus):
        return ":".join(f"{part:02x}" for part in bus)
    return entry


# From malloc.h; glibc alone has them.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MOST_BYTES = 2**31 - 1


def keep_freed_buffers() -> bool:
    """Have malloc reuse large buffers; says whether this C library can.

    glibc gives each buffer of 128 kB to 32 MB and more back to the kernel when it is freed, and the
    kernel has to clear the pages of the next one: measured on feature maps of 704² tiles, 4.3 s of
    19 CPU seconds, against 0.4 s with these limits, at a lower peak (522 instead of 538 MiB).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 2**30) and mallopt(M_TRIM_THRESHOLD, MOST_BYTES))


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
