"""Bytes of devices that hold several partitions."""

from collections.abc import Hashable, Sequence

from tilenet.choices import Checkpointing
from tilenet.planning.memory.partition import PartitionBytes


def device_bytes(
    parts: Sequence[PartitionBytes], devices: Sequence[Hashable], checkpointing: Checkpointing
) -> dict[Hashable, int]:
    """Return the bytes of each device, which may hold several partitions.

    Where every micro-batch is computed again, a device has activations of two partitions at a time:
    recomputation of one starts while those of another are still there.
    """
    by_device: dict[Hashable, int] = {}
    for device in devices:
        here = [part for part, other in zip(parts, devices, strict=True) if other == device]
        activations = sorted(part.activations for part in here)
        live = activations[-2:] if checkpointing == "always" else activations
        by_device[device] = sum(part.fixed for part in here) + sum(live)
    return by_device
