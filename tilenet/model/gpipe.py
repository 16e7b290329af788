"""torchgpipe: all that tilenet uses of it, by name. No other module imports it.

It keeps its engine's parts in private modules and has not changed since 2020; what has to be told
apart from it, or put in its place, is here.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torchgpipe import is_recomputing, phony
from torchgpipe.checkpoint import enable_recomputing, is_checkpointing
from torchgpipe.copy import Copy
from torchgpipe.dependency import join
from torchgpipe.microbatch import Batch
from torchgpipe.phony import get_phony
from torchgpipe.pipeline import Pipeline, clock_cycles
from torchgpipe.skip import Namespace, pop, skippable, stash
from torchgpipe.skip.layout import SkipLayout, inspect_skip_layout
from torchgpipe.skip.portal import Portal, PortalCopy
from torchgpipe.skip.skippable import Skippable
from torchgpipe.skip.tracker import (
    SkipTracker,
    SkipTrackerThroughPotals,
    current_skip_tracker,
    use_skip_tracker,
)
from torchgpipe.stream import AbstractStream, get_device, new_stream, use_device, use_stream
from torchgpipe.worker import Task, spawn_workers

__all__ = [
    "AbstractStream",
    "Batch",
    "Copy",
    "Namespace",
    "Pipeline",
    "Portal",
    "PortalCopy",
    "SkipLayout",
    "SkipTracker",
    "SkipTrackerThroughPotals",
    "Skippable",
    "Task",
    "clock_cycles",
    "copies_made_by",
    "current_skip_tracker",
    "enable_recomputing",
    "get_device",
    "get_phony",
    "inspect_skip_layout",
    "is_checkpointing",
    "is_recomputing",
    "join",
    "new_phonies",
    "new_stream",
    "pop",
    "skippable",
    "spawn_workers",
    "stash",
    "use_device",
    "use_own_skips",
    "use_skip_tracker",
    "use_stream",
]


def use_own_skips() -> AbstractContextManager[None]:
    """Context with a tracker of its own: the thread's would keep what is stashed forever."""
    own: AbstractContextManager[None] = use_skip_tracker(SkipTracker())
    return own


@contextmanager
def new_phonies() -> Iterator[None]:
    """Context without torchgpipe's store of empty tensors: fake ones must not meet real ones."""
    before = dict(phony._phonies)
    phony._phonies.clear()
    try:
        yield
    finally:
        phony._phonies.clear()
        phony._phonies.update(before)


@contextmanager
def copies_made_by(
    copy: Callable[[Tensor, int], Tensor], owner_of: Callable[[Tensor], int | None]
) -> Iterator[None]:
    """Context in which maps are copied between partitions that share one device, too.

    Args:
        copy: Copies a tensor for a partition.
        owner_of: The partition of a tensor; None: nobody knows.
    """
    before = Copy.forward, Copy.backward, SkipTrackerThroughPotals.copy
    of_skip: list[tuple[int, int]] = []  # where the skip under way comes from, and goes

    def forward(ctx: Any, before: Any, behind: Any, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.prev_stream, ctx.next_stream = before, behind
        source = (owner_of(given[0]) or 0) if given else 0
        ctx.source, target = of_skip[-1] if of_skip else (source, source + 1)
        return tuple(copy(x, target) for x in given)

    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(copy(x, ctx.source) for x in given))

    def copy_skip(tracker: Any, batch: Any, prev: Any, behind: Any, ns: Any, name: str) -> None:
        of_skip.append(tracker.skip_layout.by_ns_name[ns, name])
        before[2](tracker, batch, prev, behind, ns, name)
        of_skip.pop()

    Copy.forward, Copy.backward = staticmethod(forward), staticmethod(backward)
    SkipTrackerThroughPotals.copy = copy_skip
    try:
        yield
    finally:
        Copy.forward, Copy.backward = staticmethod(before[0]), staticmethod(before[1])
        SkipTrackerThroughPotals.copy = before[2]
