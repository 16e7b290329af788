"""The origin of a micro-batch's samples, for masks of dropout and for halos."""

from dataclasses import dataclass

from tilenet.geometry.tiles import Tiling
from tilenet.model.gpipe import SkipLayout, SkipTrackerThroughPotals, current_skip_tracker


@dataclass(frozen=True)
class Origin:
    """The images and tiles of a micro-batch's samples.

    Attributes:
        images: The number of each sample's image.
        tiling: Tiling of these images, all of one size; None: not needed.
        tiles: The number of each sample's tile in `tiling`, row by row.
        micro_batch: Place of the micro-batch in the mini-batch.
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
    """The origin of the micro-batch that this thread computes; None outside of a pipeline."""
    origin: Origin | None = getattr(current_skip_tracker(), "origin", None)
    return origin
