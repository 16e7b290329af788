"""A tile of a step: which it is, and its pixels and labels once it is read."""

from dataclasses import dataclass, replace

from torch import Tensor

from tilenet.data.schedule import Sample
from tilenet.geometry.tiles import Tile, Tiling, owned
from tilenet.geometry.windows import Window
from tilenet.model.upload import pinned


@dataclass(frozen=True)
class TileTask:
    """A tile to be computed.

    Attributes:
        sample: The image or crop.
        tiling: The tiling of the image or crop.
        number: Number of the tile, row by row.
    """

    sample: Sample
    tiling: Tiling
    number: int

    @property
    def tile(self) -> Tile:
        """The tile's windows."""
        return self.tiling.tiles[self.number]


@dataclass(frozen=True)
class ReadTile:
    """A tile with its pixels and labels; one sample of a micro-batch.

    Attributes:
        work: Which tile it is.
        image: Standardised pixels of the window that it reads, (1, bands, H, W).
        labels: Labels of the window that it owns, (1, h, w), integers of any width; in a
            regression float64.
    """

    work: TileTask
    image: Tensor
    labels: Tensor

    @property
    def pinned(self) -> "ReadTile":
        """The same in pinned memory."""
        return replace(self, image=pinned(self.image), labels=pinned(self.labels))

    def labels_of(self, window: Window) -> Tensor:
        """The labels of a window that the tile owns."""
        return owned(self.labels, Tile(self.work.tile.own, window))
