"""A tile of a step: which it is, and its pixels and labels once it is read."""

from dataclasses import dataclass, replace

from torch import Tensor

from tilenet.data.schedule import Sample
from tilenet.geometry.tiles import Tile, Tiling
from tilenet.model.upload import pinned

__all__ = ["ReadTile", "Work"]


@dataclass(frozen=True)
class Work:
    """A tile to be computed.

    Attributes:
        sample: The image or crop.
        tiling: How that is cut.
        number: The tile's, row by row.
    """

    sample: Sample
    tiling: Tiling
    number: int

    @property
    def tile(self) -> Tile:
        """Its windows."""
        return self.tiling.tiles[self.number]


@dataclass(frozen=True)
class ReadTile:
    """A tile that was read, a sample of a micro-batch.

    Attributes:
        work: Which tile it is.
        image: Standardised, of what it reads, (1, bands, H, W).
        labels: Of what it owns, (1, h, w), whole numbers of any width; of a regression float64.
    """

    work: Work
    image: Tensor
    labels: Tensor

    @property
    def pinned(self) -> "ReadTile":
        """The same in pinned memory."""
        return replace(self, image=pinned(self.image), labels=pinned(self.labels))
