"""What the partitions of a pipeline swap to host memory."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from tilenet.parallel.pipeline.host_store import HostStore
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.swap.host_pool import Slabs
from tilenet.parallel.swap.swap_in_forward import SwapInForward
from tilenet.parallel.swap.swapper import Swapper

__all__ = ["PipeSwaps", "fetched_ahead"]


def fetched_ahead(device: torch.device) -> int:
    """Storages that are fetched ahead: none where copies are done when they return."""
    return 0 if device.type == "cpu" else 2


class PipeSwaps:
    """The swapper of a rank, and the stores of its partitions.

    Args:
        layers: Of each partition so many swap what they save, from the first on.
        devices: One per partition.
        slabs: Where it goes.
        stored: Whether skips between partitions and inputs of checkpoints go out as well.
        largest_bytes: Largest storage that goes out.
        min_bytes: Smaller storages stay.
        in_flight: Bytes of copies out that may be under way, of each partition.
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
