"""Stash and pop: skips by name, as torchgpipe's pipeline moves them between partitions.

Outside of a pipeline the same modules work through torchgpipe's default tracker of the thread.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilenet.geometry.tiles import Tiling
from tilenet.model.gpipe import (
    Namespace,
    SkipLayout,
    SkipTrackerThroughPotals,
    current_skip_tracker,
    pop,
    skippable,
    stash,
)

__all__ = ["Origin", "OriginTracker", "origin_under_way", "pop_layer", "stash_layer"]


@dataclass(frozen=True)
class Origin:
    """Where the samples of a micro-batch come from.

    Attributes:
        images: The number of each sample's image.
        tiling: How these images, all of one size, are cut; None: nobody needs to know.
        tiles: The number of each sample's tile in `tiling`, row by row.
        micro_batch: Its place in the mini-batch.
    """

    images: tuple[int, ...]
    tiling: Tiling | None = None
    tiles: tuple[int, ...] = ()
    micro_batch: int = 0


class OriginTracker(SkipTrackerThroughPotals):  # type: ignore[misc]
    """Keeps a micro-batch's skips, and where its samples come from.

    It is the one thing that torchgpipe hands along with a micro-batch, from partition to partition
    and thread to thread, and again when activations are recomputed.
    """

    def __init__(self, layout: SkipLayout, origin: Origin | None) -> None:
        super().__init__(layout)
        self.origin = origin


def origin_under_way() -> Origin | None:
    """That of the micro-batch that this thread computes; None outside of a pipeline."""
    tracker = current_skip_tracker()
    return tracker.origin if isinstance(tracker, OriginTracker) else None


class Stash(nn.Module):
    """Hands on its input and keeps it for the `PopConcat` of the same namespace."""

    def forward(self, x: Tensor) -> Generator[Any, None, Tensor]:
        yield stash("skip", x)
        return x


class PopConcat(nn.Module):
    """Concatenates its input with the stashed map along the channels, (B, C, H, W).

    Args:
        fit: `crop` cuts the stashed map evenly to the input's size; `pad` adds zeros below and
            right of the input, as torchgpipe's U-Net does where a pooling dropped a row or column.
    """

    def __init__(self, fit: str) -> None:
        super().__init__()
        self.fit = fit

    def forward(self, x: Tensor) -> Generator[Any, Tensor, Tensor]:
        skip = yield pop("skip")
        rows, cols = skip.shape[2] - x.shape[2], skip.shape[3] - x.shape[3]
        if self.fit == "crop":
            top, left = rows // 2, cols // 2
            skip = skip[:, :, top : top + x.shape[2], left : left + x.shape[3]]
        elif rows or cols:
            x = F.pad(x, (0, cols, 0, rows))
        return torch.cat((x, skip), dim=1)


# Functions instead of decorators: mypy does not follow decorators that change a class (mypy#3135).
_SkippableStash: Any = skippable(stash=["skip"])(Stash)
_SkippablePop: Any = skippable(pop=["skip"])(PopConcat)


def stash_layer(namespace: Namespace) -> nn.Module:
    """A stash whose skip only the pop of the same namespace receives."""
    layer: nn.Module = _SkippableStash().isolate(namespace)
    return layer


def pop_layer(namespace: Namespace, fit: str) -> nn.Module:
    """The pop for the stash of the same namespace."""
    layer: nn.Module = _SkippablePop(fit).isolate(namespace)
    return layer
