"""Swapping of a pipeline's partitions to host memory."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from tilenet.parallel.pipeline.host_store import HostStore
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.swap.host_pool import Slabs
from tilenet.parallel.swap.swap_in_forward import SwapInForward
from tilenet.parallel.swap.swapper import Swapper


def fetched_ahead(device: torch.device) -> int:
    """Number of storages that are fetched ahead: 0 if copies are synchronous."""
    return 0 if device.type == "cpu" else 2


class PipeSwaps:
    """The swapper of a rank, and the stores of its partitions.

    Args:
        layers: Number of leading layers of each partition that swap their saved tensors.
        devices: One device per partition.
        slabs: The pool to which storages go.
        stored: Whether skips between partitions and inputs of checkpoints go out as well.
        largest_bytes: Bytes of the largest storage that goes out.
        min_bytes: Smaller storages stay.
        in_flight: Most bytes of copies out that are under way, for each partition.
    """

    def __init__(
        self,
        layers: Sequence[int],
        devices: Sequence[torch.device],
        slabs: Slabs,
        *,
        stored: bool,
        largest_bytes: int,
        min_bytes: int,
        in_flight: Sequence[float],
    ) -> None:
        self._layers = layers
        ahead = fetched_ahead(devices[0])
        most: dict[torch.device, float] = {}
        for device, num_bytes in zip(devices, in_flight, strict=True):
            most[device] = most.get(device, 0) + num_bytes
        self._swapper = Swapper(ahead * largest_bytes, min_bytes, ahead, slabs, most)
        self.statistics = self._swapper.statistics
        copies = self._swapper.copies
        self.stores = (
            [HostStore(copies, device, min_bytes, min(ahead, 1)) for device in devices]
            if stored
            else None
        )

    def swapping(self, pipe: Pipe) -> AbstractContextManager[None]:
        """Let the pipe's layers swap as planned."""
        parts = zip(pipe.partitions, self._layers, strict=True)
        # Layer by layer, so that an input goes as soon as the next one has it.
        layers = [layer for part, count in parts for layer in list(part)[:count]]
        return SwapInForward(self._swapper).around(layers)

    def close(self) -> None:
        """Give host memory or the file back."""
        self._swapper.close()
