"""Maps that live long in a pipeline wait on the host, from a micro-batch's forward to its backward.

Under checkpointing these are the inputs of partitions and the skips between them: m of each, one
per micro-batch, while all other tensors exist for one micro-batch only. Away from the device, they
leave a peak that hardly depends on m. Saved-tensor hooks around layers see neither: tensors inside
a checkpoint are not saved, and torchgpipe's skips are hidden from autograd.
"""

import weakref
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from tilenet.parallel.swap.copies import Arrival, HostCopies, HostCopy


class Store(ABC):
    """Storage for maps of a partition that wait."""

    @abstractmethod
    def takes(self, tensor: Tensor) -> bool:
        """Whether a map may wait here; else it stays where it is."""

    @abstractmethod
    def put(self, tensor: Tensor) -> Any:
        """Let a map of this partition wait; the caller drops the tensor."""

    @abstractmethod
    def get(self, stored: Any) -> Tensor:
        """A waiting map, of whichever partition, on this partition's device."""

    @abstractmethod
    def expect(self, stored: Any) -> None:
        """Say that backward here will get this map, after those which are expected later."""


class Stored:
    """A map that waits; its room is given back when this object is freed.

    Args:
        tensor: The map.
        copies: The pool to which its storage goes.
    """

    def __init__(self, tensor: Tensor, copies: HostCopies) -> None:
        self._copies, self._dtype = copies, tensor.dtype
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()
        self._ahead: tuple[torch.UntypedStorage, Arrival | None] | None = None
        self._on_device: Any = None
        self._copy: HostCopy | None = None  # set where sending failed, too
        self._copy = copies.send(tensor.untyped_storage())

    def fetch(self, device: torch.device) -> None:
        """Begin to bring it to a device, unless that is done."""
        if self._ahead is None:
            assert self._copy is not None
            self._ahead = self._copies.fetch(self._copy, device)

    def take(self, device: torch.device) -> Tensor:
        """The map on a device; the work under way there waits for it."""
        # torchgpipe asks for a checkpoint's input twice, the second time to count it.
        storage = None if self._on_device is None else self._on_device()
        arrival = None
        if storage is None or storage.device != device:
            self.fetch(device)
            assert self._ahead is not None
            (storage, arrival), self._ahead = self._ahead, None
            self._on_device = weakref.ref(storage)
        empty = torch.empty(0, dtype=self._dtype, device=device)
        tensor = empty.set_(storage, self._offset, self._shape, self._stride)
        if arrival is not None:
            arrival.before_use(tensor)
        return tensor

    def __del__(self) -> None:
        if self._ahead is not None and self._ahead[1] is not None:
            self._ahead[1].before_drop()
        if self._copy is not None:
            self._copies.release(self._copy)


class HostStore(Store):
    """Maps wait in a pool of host memory, or in a file.

    Args:
        copies: Copies to the pool and from there; partitions share one.
        device: The partition's device.
        min_bytes: Smaller maps stay where they are.
        lookahead: Maps that are fetched ahead in backward; 0 if copies are synchronous.
    """

    def __init__(
        self, copies: HostCopies, device: torch.device, min_bytes: int = 0, lookahead: int = 0
    ) -> None:
        self._copies, self._device = copies, device
        self._min_bytes, self._lookahead = min_bytes, lookahead
        self._expected: list[weakref.ref[Stored]] = []

    def takes(self, tensor: Tensor) -> bool:
        num_bytes = tensor.untyped_storage().nbytes()
        return num_bytes >= max(self._min_bytes, 1) and self._copies.suits(tensor.device)

    def put(self, tensor: Tensor) -> Stored:
        """Let a map wait.

        Raises:
            TilenetError: There is no room.
        """
        return Stored(tensor, self._copies)

    def get(self, stored: Stored) -> Tensor:
        with torch.no_grad():
            tensor = stored.take(self._device)
            alive = [map_ for ref in self._expected if (map_ := ref()) is not None]
            if stored in alive:
                at = alive.index(stored)
                for other in reversed(alive[max(0, at - self._lookahead) : at]):
                    other.fetch(self._device)
                alive.pop(at)
                self._expected = [weakref.ref(map_) for map_ in alive]
            return tensor

    def expect(self, stored: Stored) -> None:
        self._expected.append(weakref.ref(stored))
