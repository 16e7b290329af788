"""A network over an image from top to bottom, strip by strip; what a strip lacks was kept before.

The layers are those of the exchange, which take halos from neighbours in space: here all that they
look at is at hand, in rows that `geometry.sweep` says to keep, and nothing is taken or given.
"""

import torch
from torch import Tensor, nn

from tilenet.errors import TilenetError
from tilenet.geometry.halo import map_grids, map_shapes
from tilenet.geometry.layers import (
    Conv,
    Expand,
    GlobalPool,
    Join,
    Layer,
    Pool,
    Stash,
    TransposedConv,
    Upsample,
)
from tilenet.geometry.ownership import LayerHalo
from tilenet.geometry.sweep import LayerRows, Rows, row_readers, sweep
from tilenet.geometry.windows import Window
from tilenet.model.modules import BatchNorm
from tilenet.model.network import Network
from tilenet.model.resample import AxisPlace, resampled
from tilenet.model.skips import joined
from tilenet.parallel.exchange.halo import Journey, Line
from tilenet.parallel.exchange.layers import spatial_layer

__all__ = ["Sweep"]

WINDOWED = Conv | Pool | TransposedConv | Upsample


class Sweep:
    """Makes the map of one image; strips go in by `feed`, in order.

    Args:
        layers: Of a network that gives one cell per pixel (*same* padding).
        network: Of these layers, in evaluation mode; statistics of whole images are given
            (`fixed.py`) or frozen.
        size: Rows and columns of the image, extended to a multiple of the alignment.
        strip_rows: Rows of a strip; the last may have fewer.

    Raises:
        TilenetError: A layer needs something of the whole image.
    """

    def __init__(
        self, layers: tuple[Layer, ...], network: Network, size: tuple[int, int], strip_rows: int
    ) -> None:
        self.layers, self.grids = layers, map_grids(layers)
        self.strips = sweep(layers, size[0], strip_rows)
        self._shapes = map_shapes(layers, *size)
        self._inputs = _inputs(layers)
        self._done_with = _last_readers(row_readers(layers))
        self._modules = [
            self._swept(layer, number, module)
            for number, (layer, module) in enumerate(zip(layers, network, strict=True))
        ]
        self._maps: list[Tensor | None] = [None for _ in self._shapes]  # rows that are held
        self._first = [0 for _ in self._shapes]
        self._next = 0
        self._now: LayerRows
        self._line = Line(None)

    def _swept(self, layer: Layer, number: int, module: nn.Module) -> nn.Module:
        whole = isinstance(module, nn.InstanceNorm2d | nn.GroupNorm | nn.AdaptiveAvgPool2d)
        if (whole or (isinstance(module, BatchNorm) and module.training)) and not (
            self.grids[number].whole
        ):
            raise TilenetError(
                f"a sweep takes statistics of the whole image as given (layer {number}: "
                f"{layer.kind}); find them first"
            )
        corners = isinstance(layer, Upsample) and layer.mode == "bilinear" and layer.corners
        if isinstance(layer, WINDOWED) and not corners and not self.grids[number].whole:
            return spatial_layer(layer, number, module, self)
        return module

    def journey(self, layer: int) -> Journey:
        """What the layer looks at: rows that are here, and its border where the image ends."""
        before, after = self._shapes[layer], self._shapes[layer + 1]
        (low, high), (start, stop) = self._now.need, self._now.out
        left, right = self.layers[layer].needs(0, after.cols - 1)
        cols = max(left, 0), min(right + 1, before.cols)
        rows = max(low, 0), min(high, before.rows)
        first = self._first[layer]
        here = self._maps[layer]
        assert here is not None
        need = Window(rows[0], cols[0], rows[1] - rows[0], cols[1] - cols[0])
        border = (
            max(-low, 0),
            max(high - before.rows, 0),
            max(-left, 0),
            max(right + 1 - before.cols, 0),
        )
        own = Window(first, 0, here.shape[2], before.cols)
        out = Window(start, 0, stop - start, after.cols)
        return Journey(LayerHalo(own, need, border, out, (), ()), self._line, 0)

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows that are kept for strips to come."""
        maps = zip(self._maps, self.grids, strict=True)
        return sum(one.nbytes for one, grid in maps if one is not None and not grid.whole)

    @torch.inference_mode()
    def feed(self, strip: Tensor) -> Tensor:
        """The output's rows that a strip completes.

        Args:
            strip: The next rows of the image, (B, bands, H, W).

        Returns:
            (B, classes, H′, W); H′ may be 0.
        """
        plan = self.strips[self._next]
        self._next += 1
        self._add(0, strip)
        for number, (layer, rows) in enumerate(zip(self.layers, plan.layers, strict=True)):
            self._now = rows
            if self.grids[number + 1].whole:
                if self._maps[number + 1] is None:
                    self._maps[number + 1] = self._whole(number, layer, strip)
            elif rows.out[0] < rows.out[1]:
                self._add(number + 1, self._computed(number, layer, rows))
            for map_ in self._done_with[number]:
                self._keep(map_, plan.held[map_][0])
        out, shape = self._maps[-1], self._shapes[-1]
        self._maps[-1], self._first[-1] = None, plan.output[1]
        return strip.new_empty(len(strip), shape.channels, 0, shape.cols) if out is None else out

    def _add(self, number: int, rows: Tensor) -> None:
        held = self._maps[number]
        self._maps[number] = rows if held is None else torch.cat([held, rows], 2)

    def _keep(self, number: int, first: int) -> None:
        """Let rows before the first one go."""
        held = self._maps[number]
        if held is None or self.grids[number].whole:
            return
        rest = held[:, :, first - self._first[number] :]
        # A part of a tensor would keep all of it in memory.
        self._maps[number] = rest.clone() if rest.shape[2] else None
        self._first[number] = first

    def _rows(self, number: int, rows: Rows) -> Tensor:
        """Rows of a map; all of a whole one."""
        held, first = self._maps[number], self._first[number]
        assert held is not None
        return held if self.grids[number].whole else held[:, :, rows[0] - first : rows[1] - first]

    def _whole(self, number: int, layer: Layer, strip: Tensor) -> Tensor:
        """A map that all rows have; averages are given."""
        if isinstance(layer, GlobalPool) and not self.grids[number].whole:
            out: Tensor = self._modules[number](strip)
            return out
        return self._computed(number, layer, LayerRows((0, 0), (0, 0)))

    def _computed(self, number: int, layer: Layer, rows: LayerRows) -> Tensor:
        taken = self._inputs[number]
        match layer:
            case Stash():
                return self._rows(number, rows.out)
            case Join():
                kept = [self._rows(one, rows.out) for one in taken[1:]]
                x = kept[0] if layer.how == "take" else self._rows(number, rows.out)
                return joined(layer, x, kept)
            case Expand():
                x = self._rows(number, rows.out)
                return self._enlarged(number, x, (0, x.shape[2]), layer.mode, layer.corners)
            case Upsample(mode="bilinear", corners=True) if not self.grids[number].whole:
                low = max(rows.need[0], 0)
                x = self._rows(number, (low, min(rows.need[1], self._shapes[number].rows)))
                return self._enlarged(number, x, (low, self._shapes[number].rows), "bilinear", True)
        if isinstance(layer, WINDOWED) and not self.grids[number].whole:
            out: Tensor = self._modules[number](self._maps[number])  # `journey` says which rows
        else:
            out = self._modules[number](self._rows(number, rows.out))
        return out

    def _enlarged(
        self, number: int, x: Tensor, place: tuple[int, int], mode: str, corners: bool
    ) -> Tensor:
        """Rows of an enlarged map, of a part that begins at `place` of so many rows."""
        (start, stop), after = self._now.out, self._shapes[number + 1]
        along = AxisPlace(*place, start, stop - start, after.rows)
        across = AxisPlace(0, x.shape[3], 0, after.cols, after.cols)
        return resampled(x, along, across, mode, corners=corners)


def _inputs(layers: tuple[Layer, ...]) -> list[tuple[int, ...]]:
    """For each layer the maps that it takes: its own input, then the kept ones."""
    kept: dict[str, int] = {}
    found = []
    for number, layer in enumerate(layers):
        found.append((number, *(kept.pop(name) for name in layer.names)))
        if isinstance(layer, Stash):
            kept[layer.name] = number
    return found


def _last_readers(reads: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """For each layer the maps that it is the last to read."""
    last = {map_: layer for layer, maps in enumerate(reads) for map_ in maps}
    found: list[list[int]] = [[] for _ in reads]
    for map_ in range(len(reads)):
        # Without a reader: a map that is averaged, or whose place another takes.
        found[last.get(map_, map_)].append(map_)
    return found
