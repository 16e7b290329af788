"""Which partition each storage of a counted step belongs to."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchgpipe import phony
from torchgpipe.copy import Copy
from torchgpipe.skip.tracker import SkipTrackerThroughPotals

from tilenet.parallel.pipeline_store import Store
from tilenet.planning.live_bytes import LiveBytes

__all__ = ["ChargedStore", "Charges", "NoStore"]


class Charges:
    """Says to which partition a storage belongs: results lie where the operands lie."""

    def __init__(self, live: LiveBytes) -> None:
        self.live = live
        self._copy_to: int | None = None
        self._skip: tuple[int, int] | None = None  # where it comes from, and goes

    def of(self, func: Any, given: list[Tensor]) -> int:
        if self._copy_to is not None:
            return self._copy_to
        for tensor in given:
            owner = self.live.owner_of(tensor)
            if owner is not None:
                return owner
        return self.live.owner

    def enter(self, number: int) -> Callable[[nn.Module, Any], None]:
        def note(module: nn.Module, args: Any) -> None:
            self.live.owner = number

        return note

    @contextmanager
    def copies(self, one_device: bool) -> Iterator[None]:
        """Copy between partitions, as torchgpipe does between devices."""
        before = Copy.forward, Copy.backward, SkipTrackerThroughPotals.copy
        # torchgpipe keeps its empty tensors for ever: fake ones must not meet real ones.
        phonies = dict(phony._phonies)
        phony._phonies.clear()

        def forward(ctx: Any, before: Any, behind: Any, *given: Tensor) -> tuple[Tensor, ...]:
            ctx.prev_stream, ctx.next_stream = before, behind
            source = (self.live.owner_of(given[0]) or 0) if given else 0
            ctx.source, target = self._skip or (source, source + 1)
            return tuple(self._copy(x, target) for x in given)

        def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
            return (None, None, *(self._copy(x, ctx.source) for x in given))

        def copy_skip(tracker: Any, batch: Any, prev: Any, behind: Any, ns: Any, name: str) -> None:
            self._skip = tracker.skip_layout.by_ns_name[ns, name]
            before[2](tracker, batch, prev, behind, ns, name)
            self._skip = None

        if not one_device:
            Copy.forward, Copy.backward = staticmethod(forward), staticmethod(backward)
            SkipTrackerThroughPotals.copy = copy_skip
        try:
            yield
        finally:
            Copy.forward, Copy.backward = staticmethod(before[0]), staticmethod(before[1])
            SkipTrackerThroughPotals.copy = before[2]
            phony._phonies.clear()
            phony._phonies.update(phonies)

    def _copy(self, x: Tensor, target: int) -> Tensor:
        with self.on(target):
            return torch.empty(x.shape, dtype=x.dtype).copy_(x.detach())

    @contextmanager
    def on(self, number: int) -> Iterator[None]:
        """Charge what is made to a partition."""
        before, self._copy_to = self._copy_to, number
        try:
            yield
        finally:
            self._copy_to = before


class NoStore(Store):
    """Maps without memory wait nowhere, and are made anew."""

    def takes(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().nbytes() > 0

    def put(self, tensor: Tensor) -> Any:
        return [tensor.dtype, tensor.shape, tensor.stride(), lambda: None]

    def get(self, stored: Any) -> Tensor:
        dtype, shape, stride, known = stored
        if known() is not None:
            # torchgpipe asks for a checkpoint's input twice, the second time to count it. (A view
            # of the first would stay in the caches of fake tensors.)
            return torch.empty(0, dtype=dtype)
        made = torch.empty_strided(shape, stride, dtype=dtype)
        stored[-1] = weakref.ref(made.untyped_storage())
        return made

    def expect(self, stored: Any) -> None:
        pass


class ChargedStore(Store):
    """A store whose partition is charged with what comes back."""

    def __init__(self, store: Store, charges: Charges, number: int) -> None:
        self._store, self._charges, self._number = store, charges, number

    def takes(self, tensor: Tensor) -> bool:
        return self._store.takes(tensor)

    def put(self, tensor: Tensor) -> Any:
        return self._store.put(tensor)

    def get(self, stored: Any) -> Tensor:
        with self._charges.on(self._number):
            return self._store.get(stored)

    def expect(self, stored: Any) -> None:
        self._store.expect(stored)
