"""Bytes that the ranks of a node need of its memory, beside what stands on devices."""

from dataclasses import dataclass

__all__ = ["HostBytes", "host_bytes"]

PROCESS_BYTES = 600 << 20  # Python, torch, GDAL and MPI; measured 0.4 GiB, CUDA's context more
GDAL_CACHE_BYTES = 64 << 20  # as files.raster sets it
READ_COPIES = 3  # the raster's own dtype, float64 while it is standardised, and the result
LABEL_BYTES = 8 + 1  # int64, and the mask of valid pixels
READ_AHEAD = 2  # micro-batches that are read before they are needed, unless the run file says more


@dataclass(frozen=True)
class HostBytes:
    """Host memory of one rank.

    Attributes:
        process: The programs and libraries.
        cache: GDAL's.
        pixels: Tiles of a mini-batch, with their labels.
        ahead: Tiles that wait to be taken, with their labels.
        weights: As they are drawn or loaded before they go to the devices, and the copy of them
            and of the optimizer's states that a checkpoint is written from while training goes on;
            there is one at a time, and what is read back is compared tensor by tensor.
        pieces: Gradients on their way between ranks.
    """

    process: int
    cache: int
    pixels: int
    ahead: int
    weights: int
    pieces: int

    @property
    def total(self) -> int:
        """All of it."""
        tiles = self.pixels + self.ahead
        return self.process + self.cache + tiles + self.weights + self.pieces


def host_bytes(
    tile_px: int, bands: int, micro_batches: int, parameter_bytes: int, optimizer_states: int
) -> HostBytes:
    """Host memory of one rank.

    Args:
        tile_px: Pixels that a tile reads.
        bands: Of the image.
        micro_batches: Tiles of a mini-batch.
        parameter_bytes: Of the whole network.
        optimizer_states: Values that the optimizer keeps per parameter.
    """
    return HostBytes(
        process=PROCESS_BYTES,
        cache=GDAL_CACHE_BYTES,
        pixels=micro_batches * tile_px * (bands * 4 * READ_COPIES + LABEL_BYTES),
        # What they take while they are read is counted there.
        ahead=READ_AHEAD * tile_px * (bands * 4 + LABEL_BYTES),
        weights=parameter_bytes * (1 + optimizer_states),
        pieces=4 << 20,
    )
