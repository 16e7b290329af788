"""torchgpipe: all that tilenet uses of it, by name. No other module imports it.

It keeps its engine's parts in private modules and has not changed since 2020; what has to be told
apart from it, or put in its place, is here.
"""

from contextlib import AbstractContextManager

from torchgpipe import is_recomputing
from torchgpipe.checkpoint import is_checkpointing
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
    "current_skip_tracker",
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


def use_own_skips() -> AbstractContextManager[None]:
    """Context with a tracker of its own: the thread's would keep what is stashed forever."""
    own: AbstractContextManager[None] = use_skip_tracker(SkipTracker())
    return own
