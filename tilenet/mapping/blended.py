"""Maps of an opaque module: windows that overlap by half, blended by a Gaussian.

Every pixel is the mean over the windows that hold it, each weighted by a Gaussian around its
middle (σ an eighth of the window: Isensee et al., nnU-Net, 2021). Windows lie on one grid of the
image and are added in one order, so tiles and ranks do not change the map; but it is not the
module's map of the whole image, which no memory holds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilenet.errors import TilenetError
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.opaque import Opaque
from tilenet.geometry.tiles import Cut, Span, Tile, Tiling, cut
from tilenet.model.origin import Origin
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.planning.memory.map_limits import countable

SIGMAS = 8  # in a window
# Steps that a tile owns a side, the most first: it computes one window more each way.
MOST_STEPS, FEW_STEPS = 16, 2


def tiles_of_windows(
    layer: Opaque,
    size: tuple[int, int],
    rule: HaloRule,
    budget_bytes: int,
    *,
    tile_px: int | None = None,
    few: bool = False,
) -> Tiling:
    """Cut an image into tiles, each computed from all windows that touch it.

    Args:
        size: Height and width of the image.
        budget_bytes: Most bytes of the blended map of a tile.
        tile_px: Largest own size that was asked for.
        few: Whether little of the image is wanted.

    Raises:
        TilenetError: The image is smaller than a window, or the tiles are smaller than a step.
    """
    if min(size) < layer.window_px:
        raise TilenetError(
            f"an image is at least as large as a window (image: {size[0]} × {size[1]} px, window: "
            f"{layer.window_px} px); map a larger one, or train on smaller crops"
        )
    step, cell_bytes = layer.step_px, 4 * layer.out_channels
    own_px = FEW_STEPS * step
    while not few and own_px < MOST_STEPS * step:
        read_px = own_px + 3 * step
        if cell_bytes * read_px**2 > budget_bytes or not countable((layer,), read_px, read_px):
            break
        own_px += step
    return cut(*size, Cut(size_px=own_px if tile_px is None else tile_px), rule)


def window_ratio(layer: Opaque, tiling: Tiling) -> float:
    """Pixels of all windows that are computed, per pixel of the image."""
    rows, cols = (
        sum(len(_starts(layer, span)) for span in spans) for spans in (tiling.rows, tiling.cols)
    )
    return rows * cols * layer.window_px**2 / (tiling.height * tiling.width)


def _starts(layer: Opaque, span: Span) -> range:
    """Return the starts, in a tile's read pixels, of the windows that touch its own pixels."""
    first = max(span.first - layer.step_px, span.start) - span.start
    last = min(span.first + span.own - span.start, span.read - layer.window_px + 1)
    return range(first, last, layer.step_px)


class BlendedWindows:
    """Maps the read pixels of tiles, window by window.

    Args:
        pipe: The network, on windows of one size.
        layer: Its layer.
    """

    def __init__(self, pipe: Pipe, layer: Opaque) -> None:
        self.pipe, self.layer = pipe, layer
        middle = (layer.window_px - 1) / 2
        far = (torch.arange(layer.window_px, dtype=torch.float64) - middle) * SIGMAS
        self._weights = torch.exp(-((far / layer.window_px) ** 2) / 2)

    def __call__(self, images: Sequence[Tensor], origins: Sequence[Origin]) -> list[Tensor]:
        """Map tiles (1, bands, H, W) to logits (1, classes, H, W); right on own pixels only."""
        return [
            self._tile(image, origin.tiling.tiles[origin.tiles[0]])
            for image, origin in zip(images, origins, strict=True)
            if origin.tiling is not None
        ]

    def _tile(self, image: Tensor, tile: Tile) -> Tensor:
        side, device = self.layer.window_px, self.pipe.devices[-1]
        weights = self._weights.to(device, image.dtype)
        height, width = image.shape[2:]
        total = image.new_zeros((1, self.layer.out_channels, height, width), device=device)
        sums = [weights.new_zeros(length) for length in (height, width)]
        read, own = tile.read, tile.own
        rows = _starts(self.layer, Span(read.row, read.height, own.row, own.height))
        cols = _starts(self.layer, Span(read.col, read.width, own.col, own.width))
        for starts, along in ((rows, sums[0]), (cols, sums[1])):
            for start in starts:
                along[start : start + side] += weights
        for row in rows:
            for col in cols:
                window = image[..., row : row + side, col : col + side]
                (scores,) = self.pipe([window.contiguous()], [Origin((0,))])
                place = total[..., row : row + side, col : col + side]
                place += scores.to(total.dtype) * weights[:, None] * weights
        return total / (sums[0][:, None] * sums[1]).clamp_min(torch.finfo(total.dtype).tiny)
