"""Predict the host memory that a node's ranks need beside what lies on their devices."""

from dataclasses import dataclass

__all__ = ["HostBytes", "host_bytes"]

CACHE_BYTES = 64 << 20
PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class HostBytes:
    """Host memory of a node, by what it is.

    Attributes:
        rasters: The tile that a rank is reading, as the file has it, with its mask.
        images: The tiles of a mini-batch, standardised.
        labels: Their labels, int64.
        cache: GDAL's blocks.
        gradients: Pieces of the gradient on their way between ranks.
    """

    rasters: int
    images: int
    labels: int
    cache: int
    gradients: int

    @property
    def total(self) -> int:
        """All together."""
        return self.rasters + self.images + self.labels + self.cache + self.gradients


def host_bytes(
    ranks_per_node: int,
    micro_batches: int,
    read_px: tuple[int, int],
    own_px: tuple[int, int],
    bands: int,
    *,
    raster_item_bytes: int = 2,
    item_bytes: int = 4,
    partitions: int = 1,
    piece_bytes: int = PIECE_BYTES,
    cache_bytes: int = CACHE_BYTES,
) -> HostBytes:
    """Host memory that reading and reducing take on a node; not Python, torch and MPI themselves.

    Args:
        read_px: Height and width of a tile's read window.
        own_px: Height and width of its own window, which has labels.
        raster_item_bytes: Of a pixel of one band in the file.
        item_bytes: Of a pixel of one band in the network (8 with `float64`).
        partitions: Devices per rank: each sums its gradient in pieces of its own.
        piece_bytes: Of such a piece.
        cache_bytes: GDAL's cache, per rank.
    """
    read = read_px[0] * read_px[1]
    own = own_px[0] * own_px[1]
    return HostBytes(
        rasters=ranks_per_node * read * (bands * raster_item_bytes + 1),
        images=ranks_per_node * micro_batches * read * bands * item_bytes,
        labels=ranks_per_node * micro_batches * own * 8,
        cache=ranks_per_node * cache_bytes,
        gradients=ranks_per_node * partitions * piece_bytes,
    )
