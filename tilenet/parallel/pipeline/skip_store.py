"""Inputs of partitions, and skips between them, wait in a store: until popped, and till backward.

torchgpipe moves a skip through a portal, which hides it from autograd: a Python object that holds
the map from its stash to its pop, and under checkpointing on to the pop's recomputation.
"""

from collections.abc import Sequence
from typing import Any

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
from tilenet.model.origin import Origin, OriginTracker
from tilenet.parallel.pipeline.host_store import Store


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
        phony_copy: Tensor = _StoredCopy.apply(self, prev_stream, next_stream, phony)
        return phony_copy

    def orange(self, phony: Tensor) -> Tensor | None:
        if self.tensor is None and self.stored is not None:  # recomputation
            self.tensor = self.target.get(self.stored)
        tensor: Tensor | None = super().orange(phony)
        self.tensor = None
        if self.tensor_life <= 0:
            self.stored = None
        return tensor


class _StoredCopy(PortalCopy):  # type: ignore[misc]
    """Fetches the map for its pop; its gradient is copied as by torchgpipe."""

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
        phony_copy: Tensor = get_phony(get_device(next_stream), requires_grad=False).detach()
        return phony_copy
