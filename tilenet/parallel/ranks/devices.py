"""Which devices each rank of a node takes, decided from what each of them sees.

Launchers differ: some show every rank all GPUs of its node, some show each rank its own, jsrun
shows those of a resource set to all ranks in it. One rule covers them: ranks that see the same GPUs
deal them out among themselves. It needs names that do not depend on who looks, because a launcher
that hides GPUs also renumbers them.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilenet.errors import TilenetError
from tilenet.mpi import Comm
from tilenet.parallel.ranks.malloc import keep_freed_buffers
from tilenet.parallel.ranks.node import cores_of_rank, ranks_of_node

# By which launchers show a rank some of a node's GPUs, by what torch calls these.
VISIBLE_DEVICES = {
    "cuda": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
}


def _gpu_type() -> str:
    """What torch calls the GPUs that it sees: `cuda` (ROCm too) or `xpu`; empty: it sees none."""
    return next((kind for kind in VISIBLE_DEVICES if getattr(torch, kind).is_available()), "")


def _best_type() -> str:
    """What torch calls the devices that `auto` takes."""
    kind = _gpu_type()
    return "cpu" if not kind or _lacks_float64(kind) else kind


def _lacks_float64(kind: str) -> bool:
    """Whether GPUs cannot compute in float64, like those of Intel for games and notebooks."""
    if kind != "xpu":
        return False
    return not getattr(torch.xpu.get_device_properties(0), "has_fp64", True)


def share_gpus(
    visible: Sequence[Sequence[str]], num_partitions: int
) -> tuple[tuple[int, ...], ...]:
    """The GPUs of each rank of a node, by the numbers that they have for that rank.

    Args:
        visible: Names of the GPUs that each rank sees, in its order.
        num_partitions: GPUs that each rank takes.

    Raises:
        TilenetError: There are too few, or two ranks would share one.
    """
    chosen = []
    for rank, gpus in enumerate(visible):
        peers = [peer for peer, names in enumerate(visible) if set(names) == set(gpus)]
        if len(gpus) < num_partitions * len(peers):
            same = f"ranks that see the same: {len(peers)}, " * (len(peers) < len(visible))
            raise TilenetError(
                f"each partition of each rank needs a device of its own (ranks on this node: "
                f"{len(visible)}, {same}partitions: {num_partitions}, devices that torch sees: "
                f"{len(gpus)}); start fewer ranks per node, take fewer partitions, show each rank "
                "all GPUs of its node (srun --gpu-bind=none, jsrun -r 1) or set device: cpu"
            )
        first = peers.index(rank) * num_partitions
        # In the order of the first of them: each may see the same GPUs in an order of its own.
        names = visible[peers[0]][first : first + num_partitions]
        chosen.append(tuple(gpus.index(name) for name in names))
    owners: dict[str, int] = {}
    for rank, numbers in enumerate(chosen):
        for name in (visible[rank][number] for number in numbers):
            if owners.setdefault(name, rank) != rank:
                raise TilenetError(
                    f"two ranks may not use one device (ranks {owners[name]} and {rank} of this "
                    f"node, GPU {name}); show each rank all GPUs of its node (srun "
                    "--gpu-bind=none, jsrun -r 1) or none that another sees"
                )
    return tuple(chosen)


def list_gpus() -> tuple[str, ...]:
    """Names of the GPUs that this rank sees, by number; the same on all ranks of the node."""
    kind = _gpu_type()
    if not kind:
        return ()
    gpus = torch.get_device_module(kind)
    entries = dict(enumerate(_entries(kind)))
    names: list[str] = []
    for number in range(gpus.device_count()):
        properties = gpus.get_device_properties(number)
        name = _identify(properties, entries.get(number, str(number)))
        names.append(name if name not in names else f"{name} #{number}")
    return tuple(names)


def _entries(kind: str) -> list[str]:
    """The launcher's entries for the GPUs that it shows, in torch's order."""
    variable = next((name for name in VISIBLE_DEVICES[kind] if os.environ.get(name)), None)
    entries = os.environ[variable].split(",") if variable else []
    # A mask of Level Zero chooses and does not order: GPUs come by their numbers, 2 before 10.
    by_number = variable == "ZE_AFFINITY_MASK"
    return sorted(entries, key=lambda entry: (len(entry), entry)) if by_number else entries


def _identify(properties: Any, entry: str) -> str:
    """A GPU's UUID, else its address on the bus, else the launcher's entry."""
    if entry.startswith("MIG-"):  # slices of a GPU have its UUID
        return entry
    # Some ROCm releases leave it zero.
    uuid = str(getattr(properties, "uuid", ""))
    if uuid.strip("0-"):
        return uuid
    bus = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in bus and any(bus):
        return ":".join(f"{part:02x}" for part in bus)
    return entry


@dataclass(frozen=True)
class NodePlace:
    """Where a rank stands on its node.

    Attributes:
        rank: Number of the rank on its node.
        size: Number of ranks on the node.
        cores: The rank's share of the node's cores.
        visible: Names of the GPUs that each of them sees; empty: all see what this rank sees.
    """

    rank: int
    size: int
    cores: int
    visible: tuple[tuple[str, ...], ...] = ()

    @property
    def has_own_gpus(self) -> bool:
        """Whether the launcher shows each of several ranks GPUs that no other rank sees."""
        names = [name for gpus in self.visible for name in gpus]
        return all(self.visible) and 0 < len(names) == len(set(names)) and self.size > 1


def find_node_place(comm: Comm, device: str | list[str] = "cpu") -> NodePlace:
    """Where this rank stands on its node, with GPUs unless `device` is `cpu`. Collective."""
    gpus = () if device == "cpu" else list_gpus()  # to look at GPUs starts their runtime
    node = ranks_of_node(comm)
    visible, cores = tuple(node.allgather(gpus)), cores_of_rank(node)
    place = NodePlace(node.rank, node.size, cores, visible)
    node.Free()
    return place


def choose_devices(
    device: str | list[str], place: NodePlace, num_partitions: int = 1
) -> tuple[torch.device, ...]:
    """The devices of a rank, one per partition.

    Args:
        device: `cpu`; `cuda` (ROCm too) or `xpu` (Intel), of which each rank of a node takes its
            share; `auto`, whichever of these torch sees; or the devices themselves, one per
            partition, of which one may be named several times. Each rank takes all that are named,
            so that several ranks of a node need one launcher that shows each of them its own.

    Raises:
        TilenetError: There are fewer devices on the node than its ranks need, ranks would share
            one by accident, a name is not that of a device, several partitions are on `xpu`, or a
            device that is named lacks float64.
    """
    if isinstance(device, list):
        devices = _parse(device, place)
    elif (kind := _best_type() if device == "auto" else device) == "cpu":
        devices = (torch.device("cpu"),) * num_partitions
    else:
        devices = _take_share(kind, place, num_partitions)
    if devices[0].type == "xpu" and len(devices) > 1:
        raise TilenetError(
            f"several partitions need streams of CUDA or ROCm (device: {device}, of type xpu, "
            f"partitions: {len(devices)}); use partitions: 1, with more ranks"
        )
    if _lacks_float64(devices[0].type):
        raise TilenetError(
            f"a device must compute in float64, in which losses and statistics are summed (device: "
            f"{device}, {torch.xpu.get_device_name(devices[0])}); set device: cpu"
        )
    return _prepare(devices, place)


def _take_share(kind: str, place: NodePlace, num_partitions: int) -> tuple[torch.device, ...]:
    """This rank's share of the node's GPUs."""
    if (name := _gpu_type()) not in ("", kind):
        raise TilenetError(
            f"a run's devices are of a type that torch sees (device: {kind}, torch sees: {name}); "
            f"set device: {name}"
        )
    here = tuple(str(number) for number in range(torch.get_device_module(kind).device_count()))
    numbers = share_gpus(place.visible or (here,) * place.size, num_partitions)[place.rank]
    return tuple(torch.device(kind, number) for number in numbers)


def _parse(names: list[str], place: NodePlace) -> tuple[torch.device, ...]:
    devices = []
    for name in names:
        try:
            device = torch.device(name)
        except RuntimeError:
            device = torch.device("meta")
        known = device.type in ("cpu", *VISIBLE_DEVICES)
        count = torch.get_device_module(device).device_count() if known else 0
        if (device.index or 0) >= count:
            cuda, xpu = torch.cuda.device_count(), torch.xpu.device_count()
            raise TilenetError(
                f"a device is cpu, cuda:<number> or xpu:<number> (device: {name}, devices that "
                f"torch sees: {cuda} cuda, {xpu} xpu); name others"
            )
        gpu = device.type != "cpu"
        devices.append(torch.device(device.type, device.index or 0) if gpu else device)
    if len({device.type for device in devices}) > 1:
        raise TilenetError(
            f"a rank's devices are of one type (device: {names}); name cpu, cuda or xpu devices "
            "alone"
        )
    if devices[0].type != "cpu" and place.size > 1 and not place.has_own_gpus:
        raise TilenetError(
            f"devices that are named belong to one rank (ranks on this node: {place.size}, device: "
            f"{names}); set device: {devices[0].type}, which gives each rank its own, or start one "
            "rank per node"
        )
    return tuple(devices)


def _prepare(devices: tuple[torch.device, ...], place: NodePlace) -> tuple[torch.device, ...]:
    if devices[0].type == "cpu":
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(place.cores)
        keep_freed_buffers()
    else:
        # Before any other call: a stray context would sit on device 0.
        torch.get_device_module(devices[0]).set_device(devices[0])
    return devices
