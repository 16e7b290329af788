"""torchgpipe: all that tilenet uses of it, by name. No other module imports it.

It keeps its engine's parts in private modules and has not changed since 2020; changes to its
behaviour are here.
"""

from contextlib import AbstractContextManager
from typing import Any

from torchgpipe import is_recomputing
from torchgpipe.checkpoint import enable_recomputing, is_checkpointing
from torchgpipe.copy import Copy
from torchgpipe.dependency import Fork, Join, join
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
    "current_skip_tracker",
    "enable_recomputing",
    "get_device",
    "get_phony",
    "inspect_skip_layout",
    "is_checkpointing",
    "is_recomputing",
    "join",
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


def _hand_on_nothing(function: Any) -> None:
    """Let a map's missing gradient stay missing, which autograd would fill in with zeros."""
    inner = function.forward

    def forward(ctx: Any, *args: Any) -> Any:
        ctx.set_materialize_grads(False)
        return inner(ctx, *args)

    function.forward = staticmethod(forward)


# A layer that takes a stashed map in place of another gives that one no gradient. Its zeros, and
# their sum with the gradients of its other users, would be two maps more at the peak.
_hand_on_nothing(Fork)
_hand_on_nothing(Join)


def use_own_skips() -> AbstractContextManager[None]:
    """Context with a tracker of its own: the thread's would keep stashed maps forever."""
    own: AbstractContextManager[None] = use_skip_tracker(SkipTracker())
    return own
