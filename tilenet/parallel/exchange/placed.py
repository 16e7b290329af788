"""Layers that must know the place of their own map on the whole map, in both halo modes.

These are averages of the whole image, layers that enlarge them again, other sizes with
`align_corners`, coordinates, and dropout of single cells, which takes its masks from the image's
cells. On the whole image alone, and without ranks, the plain modules do the same.
"""

from copy import copy
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor, nn

from tilenet.geometry.by_place import by_corners
from tilenet.geometry.layers import Expand, GlobalPool, Layer
from tilenet.geometry.ownership import own_cells
from tilenet.model.coordinates import CoordinatesMap
from tilenet.model.dropout import KeyedDropout
from tilenet.model.resample import AxisPlace, resampled
from tilenet.model.skips import Place, expand_layer
from tilenet.parallel.exchange.halo import extend
from tilenet.parallel.exchange.layers import SpatialContext, here, without_border
from tilenet.parallel.exchange.norm import Cells
from tilenet.parallel.exchange.whole_maps import AveragedOver, WholeImagePool
from tilenet.parallel.exchange.whole_maximum import WholeImageMaximum


def placed_layer(
    layer: Layer, index: int, module: nn.Module, spatial: SpatialContext
) -> nn.Module | None:
    """The module that gives the layer's output on a rank's cells; None for all other layers."""
    grids = spatial.grids
    place = partial(_place, spatial, index, grids[index + 1].stride)
    match layer:
        case Expand():
            return expand_layer(layer, place)
        case _ if grids[index].whole:  # all ranks have all of it
            return None
        case GlobalPool():
            where, comm = partial(_averaged, spatial, index), spatial.image_comm(index)
            if layer.takes == "maximum":
                return WholeImageMaximum(where, comm, shared=layer.shared)
            return WholeImagePool(layer, where, comm)
        case _ if by_corners(layer):
            return ByCorners(grids[index].stride / grids[index + 1].stride, index, spatial, place)
    return cells_placed(module, place)


def cells_placed(module: nn.Module, place: Place) -> nn.Module | None:
    """The module of a cellwise layer that depends on the cells' places; None for all others."""
    match module:
        case CoordinatesMap():
            return CoordinatesMap(module.layer, place)
        case KeyedDropout(drops="cells"):
            module = copy(module)
            module.place = lambda sample: place(sample)[0]
            return module
    return None


class ByCorners(nn.Module):
    """Larger or smaller maps with `align_corners`, (B, C, H, W) of a rank's cells in and out.

    Collective over the ranks of an image with `halo_mode: exchange`.

    Args:
        factor: Output cells per input cell along an axis.
    """

    def __init__(self, factor: Fraction, index: int, spatial: SpatialContext, place: Place) -> None:
        super().__init__()
        self.factor, self.index, self.spatial, self.place = factor, index, spatial, place

    def forward(self, x: Tensor) -> Tensor:
        tiling = here().tiling
        assert tiling is not None
        if tiling.rule.exchanged:  # all samples lie at the same place
            exchange = without_border(self.spatial.exchange(self.index))
            need, out = exchange.halo.need, exchange.halo.out
            extended = extend(x, exchange, 0.0)
            return self._resampled(extended, (out.height, out.width), 0, (need.row, need.col))
        size = int(x.shape[2] * self.factor), int(x.shape[3] * self.factor)
        parts = [self._resampled(map_[None], size, number) for number, map_ in enumerate(x)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _resampled(
        self,
        x: Tensor,
        size: tuple[int, int],
        sample: int,
        first: tuple[int, int] | None = None,
    ) -> Tensor:
        """The sample's `size` output cells; `first` is the first cell of `x`, if it has a halo."""
        (top, left), whole = self.place(sample)
        row, col = first or (int(top / self.factor), int(left / self.factor))
        rows = AxisPlace(row, int(whole[0] / self.factor), top, size[0], whole[0])
        cols = AxisPlace(col, int(whole[1] / self.factor), left, size[1], whole[1])
        return resampled(x, rows, cols, "bilinear", corners=True)


def cells_at(spatial: SpatialContext, layer: int) -> Cells:
    """The own cells of a layer's input, for the micro-batch that this thread computes."""
    origin = here()
    assert origin.tiling is not None
    rows, cols = (axis[layer] for axis in spatial.shares(origin.tiling))
    # The same tile occurs several times where crops are stacked.
    own = {tile: own_cells(rows, cols, origin.tiling, tile) for tile in set(origin.tiles)}
    places = {image: place for place, image in enumerate(dict.fromkeys(origin.images))}
    windows = tuple(own[tile] for tile in origin.tiles)
    return Cells(windows, tuple(places[image] for image in origin.images))


def _averaged(spatial: SpatialContext, layer: int) -> AveragedOver:
    tiling = here().tiling
    assert tiling is not None
    rows, cols = (axis[layer] for axis in spatial.shares(tiling))
    firsts = [divmod(number, tiling.grid[1]) for number in here().tiles]
    starts = tuple((rows.edges[row], cols.edges[col]) for row, col in firsts)
    return AveragedOver(cells_at(spatial, layer), starts, (rows.cells, cols.cells))


def _place(
    spatial: SpatialContext, layer: int, stride: Fraction, sample: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """First row and column of a sample's part of the layer's output; the whole map's size."""
    tiling, number = here().tiling, here().tiles[sample]
    assert tiling is not None
    rows, cols = (axis[layer] for axis in spatial.shares(tiling))
    row, col = divmod(number, tiling.grid[1])
    whole = rows.out_edges[-1], cols.out_edges[-1]
    if tiling.rule.exchanged:
        return (rows.out_edges[row], cols.out_edges[col]), whole
    # Its map begins where it reads, which all strides divide.
    return (int(tiling.rows[row].start / stride), int(tiling.cols[col].start / stride)), whole
