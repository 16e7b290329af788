"""Maps that live long in a pipeline wait on the host, from a micro-batch's forward to its backward.

Under checkpointing these are the inputs of partitions and the skips between them: m of each, one
per micro-batch, while of all else only one micro-batch's is there. Away from the device, they leave
a peak that hardly depends on m. Saved-tensor hooks around layers see neither: what a checkpoint
computes is not saved, and torchgpipe's skips are hidden from autograd.

Skips between partitions that wait in a store: until they are popped, and again until backward.

torchgpipe moves a skip through a portal, which hides it from autograd: a Python object that holds
the map from its stash to its pop, and under checkpointing on to the pop's recomputation.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tilenet.model.gpipe import (
    AbstractStream,
    Batch,
    Copy,
    Namespace,
    Portal,
    PortalCopy,
    SkipLayout,
    Task,
    get_device,
    get_phony,
    is_checkpointing,
    join,
)
from tilenet.model.skips import Origin, OriginTracker
from tilenet.parallel.swap.copies import Arrival, HostCopies, HostCopy

__all__ = ["HostStore", "Store", "Stored", "StoringQueue", "StoringTracker"]


class Store(ABC):
    """Where a partition's maps wait."""

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
    """A map that waits; its room is given back when nobody holds this any more.

    Args:
        tensor: The map.
        copies: Where its storage goes.
    """

    def __init__(self, tensor: Tensor, copies: HostCopies) -> None:
        self._copies, self._dtype = copies, tensor.dtype
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()
        self._ahead: tuple[torch.UntypedStorage, Arrival | None] | None = None
        self._taken: Any = None
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
        storage = None if self._taken is None else self._taken()
        arrival = None
        if storage is None or storage.device != device:
            self.fetch(device)
            assert self._ahead is not None
            (storage, arrival), self._ahead = self._ahead, None
            self._taken = weakref.ref(storage)
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
        device: The partition's.
        min_bytes: Smaller maps stay where they are.
        lookahead: Maps that are fetched ahead in backward. 0 where copies are done when
            they return.
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
            alive = [one for ref in self._expected if (one := ref()) is not None]
            if stored in alive:
                at = alive.index(stored)
                for other in reversed(alive[max(0, at - self._lookahead) : at]):
                    other.fetch(self._device)
                alive.pop(at)
                self._expected = [weakref.ref(one) for one in alive]
            return tensor

    def expect(self, stored: Stored) -> None:
        self._expected.append(weakref.ref(stored))


class StoringQueue:
    """A worker's queue: the checkpoint of the task that is put keeps a stored map as its input.

    Args:
        queue: The worker's.
        store: Store of the partition.
        stored: The input of the micro-batch.
    """

    def __init__(self, queue: Any, store: Store, stored: Any) -> None:
        self._queue, self._store, self._stored = queue, store, stored

    def put(self, task: Task) -> None:
        """Put a task."""
        self._queue.put(_StoringTask(task, self._store, self._stored))


class _StoringTask:
    """torchgpipe's checkpoint saves its input twice: once in vain, once for recomputation.

    Hooks belong to a thread, so they are entered by the one that computes, and by the one that
    finalizes. In between nothing is saved: a checkpoint computes without autograd.
    """

    def __init__(self, task: Task, store: Store, stored: Any) -> None:
        self._task, self._store, self._stored = task, store, stored

    def compute(self) -> Batch:
        with saved_tensors_hooks(lambda _: None, _never):
            return self._task.compute()

    def finalize(self, batch: Batch) -> None:
        stored = self._stored
        with saved_tensors_hooks(lambda _: stored, self._store.get):
            self._task.finalize(batch)


def _never(_: Any) -> Tensor:
    raise AssertionError("torchgpipe needs a checkpoint's input where it recomputes")


# How often torchgpipe takes a checkpointed map out of its portal: it is stashed, popped, and popped
# again in recomputation.
LIFE = 3


class StoringTracker(OriginTracker):
    """Keeps a micro-batch's skips in the partitions' stores."""

    def __init__(self, layout: SkipLayout, origin: Origin, stores: Sequence[Store]) -> None:
        super().__init__(layout, origin)
        self._stores = stores

    def save(self, batch: Batch, ns: Namespace, name: str, tensor: Tensor | None) -> None:
        """Stash a map."""
        if tensor is None or not self._waits(ns, name, tensor):
            super().save(batch, ns, name, tensor)
            return
        source, target = self.skip_layout.by_ns_name[ns, name]
        portal = _StoredPortal(tensor, self._stores[source], self._stores[target])
        self.portals[ns, name] = portal
        batch[0] = join(batch[0], portal.blue())

    def _waits(self, ns: Namespace, name: str, tensor: Tensor) -> bool:
        # Without checkpointing the layers around the stash keep the map anyway. In recomputation it
        # was popped already, and only its gradient is to come.
        if not self.skip_layout.requires_copy(ns, name) or not is_checkpointing():
            return False
        source, _ = self.skip_layout.by_ns_name[ns, name]
        return (ns, name) not in self.portals and self._stores[source].takes(tensor)


class _StoredPortal(Portal):  # type: ignore[misc]
    """A portal with nothing in it while its map waits."""

    tensor: Tensor | None

    def __init__(self, tensor: Tensor, source: Store, target: Store) -> None:
        super().__init__(tensor, LIFE)
        self.target = target
        self.stored: Any = source.put(tensor)

    def blue(self) -> Tensor:
        phony: Tensor = super().blue()
        self.tensor = None
        return phony

    def copy(
        self, prev_stream: AbstractStream, next_stream: AbstractStream, phony: Tensor
    ) -> Tensor:
        made: Tensor = _StoredCopy.apply(self, prev_stream, next_stream, phony)
        return made

    def orange(self, phony: Tensor) -> Tensor | None:
        if self.tensor is None and self.stored is not None:  # recomputation
            self.tensor = self.target.get(self.stored)
        tensor: Tensor | None = super().orange(phony)
        self.tensor = None
        if self.tensor_life <= 0:
            self.stored = None
        return tensor


class _StoredCopy(PortalCopy):  # type: ignore[misc]
    """Fetches the map for its pop; its gradient is copied as ever."""

    @staticmethod
    def forward(
        ctx: Any,
        portal: _StoredPortal,
        prev_stream: AbstractStream,
        next_stream: AbstractStream,
        phony: Tensor,
    ) -> Tensor:
        ctx.portal = portal
        Copy.forward(ctx, prev_stream, next_stream)  # of nothing: notes the way back
        portal.tensor = portal.target.get(portal.stored)
        portal.target.expect(portal.stored)
        made: Tensor = get_phony(get_device(next_stream), requires_grad=False).detach()
        return made
