"""An image on which a network is scored while it trains, and what counts of it."""

from dataclasses import dataclass

from tilenet.files.label_source import LabelSource
from tilenet.files.raster import Raster
from tilenet.geometry.tiles import Window

__all__ = ["ValidationImage"]


@dataclass(frozen=True)
class ValidationImage:
    """An image, or the held-out parts of one; the files stay those of whoever opened them.

    Attributes:
        image: Open.
        labels: Open, on the image's grid; `ignore_index` on pixels that do not count.
        windows: Pixels of the image that hold all that counts, and so must be computed; None: all.
    """

    image: Raster
    labels: LabelSource
    windows: tuple[Window, ...] | None
