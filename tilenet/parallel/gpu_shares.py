"""Which GPUs of a node each of its ranks takes: decided from what each of them sees.

Launchers differ: some show every rank all GPUs of its node, some show each rank its own, jsrun
shows those of a resource set to all ranks in it. One rule covers them: ranks that see the same GPUs
deal them out among themselves. It needs names that do not depend on who looks, because a launcher
that hides GPUs also renumbers them.
"""

import os
from collections.abc import Sequence

import torch

from tilenet.errors import TilenetError

__all__ = ["share_gpus", "visible_gpus"]

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
    uuid = str(getattr(found, "uuid", ""))  # from torch 2.4 on; some ROCm releases leave it zero
    if uuid.strip("0-"):
        return uuid
    bus = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in bus and any(bus):
        return ":".join(f"{part:02x}" for part in bus)
    return entry
