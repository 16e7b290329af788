"""Layers that must know where on the whole map their own map lies, in both halo modes.

An average of the whole image; what enlarges it again; enlargement with `align_corners`; dropout of
single cells, whose masks are those of the cells of the image. On the whole image alone, and without
ranks, the plain modules do the same.
"""

from copy import copy
from functools import partial

import torch
from torch import Tensor, nn

from tilenet.geometry.layers import Dropout, Expand, GlobalPool, Layer, Upsample
from tilenet.geometry.ownership import own_cells
from tilenet.geometry.windows import Window
from tilenet.model.dropout import KeyedDropout
from tilenet.model.resample import AxisPlace, resampled
from tilenet.model.skips import expand_layer
from tilenet.parallel.exchange.halo import extend
from tilenet.parallel.exchange.layers import Surroundings, here, without_border
from tilenet.parallel.exchange.norm import Cells
from tilenet.parallel.exchange.whole_maps import AveragedOver, WholeImagePool

__all__ = ["cells_at", "placed_layer"]


def placed_layer(
    layer: Layer, index: int, module: nn.Module, around: Surroundings
) -> nn.Module | None:
    """The module that gives the layer's output on a rank's cells; None: it is not of this kind."""
    match layer:
        case GlobalPool():
            where = partial(_averaged, around, index)
            return WholeImagePool(layer.bins, where, around.image_comm(index))
        case Expand():
            return expand_layer(layer, partial(_output_place, around, index))
        case Upsample(mode="bilinear", corners=True):
            return CornersUpsample(layer, index, around)
        case Dropout(drops="cells"):
            assert isinstance(module, KeyedDropout)
            dropout = copy(module)
            dropout.place = partial(_first_cell, around, index)
            return dropout
    return None


class CornersUpsample(nn.Module):
    """Bilinear enlargement with `align_corners`, (B, C, H, W) of a rank's cells in and out.

    Collective over the ranks of an image with `halo_mode: exchange`.
    """

    def __init__(self, layer: Upsample, index: int, around: Surroundings) -> None:
        super().__init__()
        self.layer, self.index, self.around = layer, index, around

    def forward(self, x: Tensor) -> Tensor:
        tiling = here().tiling
        assert tiling is not None
        if tiling.rule.exchanged:  # all samples stand at the same place
            journey = without_border(self.around.journey(self.index))
            need = journey.halo.need
            return self._enlarged(extend(x, journey, 0.0), 0, (need.row, need.col))
        parts = [self._enlarged(one[None], number) for number, one in enumerate(x)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _enlarged(self, x: Tensor, sample: int, first: tuple[int, int] | None = None) -> Tensor:
        """The sample's window; `first` says where on the map `x` begins, if it has a halo."""
        out, whole = _output_place(self.around, self.index, sample)
        factor = self.layer.factor
        row, col = first or (out.row // factor, out.col // factor)
        high = AxisPlace(row, whole[0] // factor, out.row, out.height, whole[0])
        wide = AxisPlace(col, whole[1] // factor, out.col, out.width, whole[1])
        return resampled(x, high, wide, "bilinear", corners=True)


def cells_at(around: Surroundings, layer: int) -> Cells:
    """Which cells count in a layer's input, of the micro-batch that this thread computes."""
    origin = here()
    assert origin.tiling is not None
    rows, cols = (axis[layer] for axis in around.shares(origin.tiling))
    own = [own_cells(rows, cols, origin.tiling, number) for number in origin.tiles]
    places = {image: place for place, image in enumerate(dict.fromkeys(origin.images))}
    return Cells(tuple(own), tuple(places[image] for image in origin.images))


def _averaged(around: Surroundings, layer: int) -> AveragedOver:
    tiling = here().tiling
    assert tiling is not None
    rows, cols = (axis[layer] for axis in around.shares(tiling))
    firsts = [divmod(number, tiling.grid[1]) for number in here().tiles]
    starts = tuple((rows.edges[row], cols.edges[col]) for row, col in firsts)
    return AveragedOver(cells_at(around, layer), starts, (rows.cells, cols.cells))


def _output_place(
    around: Surroundings, layer: int, sample: int
) -> tuple[Window, tuple[int, int]]:
    """The window of the layer's output that the rank computes of a sample; the whole map's size."""
    tiling, number = here().tiling, here().tiles[sample]
    assert tiling is not None
    rows, cols = (axis[layer] for axis in around.shares(tiling))
    row, col = divmod(number, tiling.grid[1])
    whole = rows.out_edges[-1], cols.out_edges[-1]
    if tiling.rule.exchanged:
        top, left = rows.out_edges[row], cols.out_edges[col]
        height, width = rows.out_edges[row + 1] - top, cols.out_edges[col + 1] - left
        return Window(top, left, height, width), whole
    # It computes the cells of its read window.
    down, right = tiling.rows[row], tiling.cols[col]
    across = tiling.extended[0] // whole[0], tiling.extended[1] // whole[1]
    return Window(
        down.start // across[0], right.start // across[1],
        down.read // across[0], right.read // across[1],
    ), whole  # fmt: skip


def _first_cell(around: Surroundings, layer: int, sample: int) -> tuple[int, int]:
    """Row and column of the whole map at which the map that the rank computes begins."""
    place, _ = _output_place(around, layer, sample)
    return place.row, place.col
