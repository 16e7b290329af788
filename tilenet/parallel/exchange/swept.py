"""A network over an image from top to bottom, strip by strip, with rows kept of strips before.

The layers are those of the exchange, which take halos from neighbours in space. Here the rows that
they look at are at hand, since `geometry.sweep` says which rows to keep. All columns are at hand,
or each rank holds its own columns, and a layer takes those next to them from the neighbours.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tilenet.errors import TilenetError
from tilenet.geometry.by_place import by_corners
from tilenet.geometry.layers import (
    Cellwise,
    Conv,
    Dropout,
    Expand,
    GlobalPool,
    Join,
    Layer,
    Pool,
    Stash,
    TransposedConv,
    Upsample,
    across,
)
from tilenet.geometry.maps import map_grids, map_shapes
from tilenet.geometry.ownership import AxisShares, axis_shares, halo_of
from tilenet.geometry.sweep import (
    LayerRows,
    Rows,
    Strip,
    last_readers,
    maps_before,
    row_readers,
    sweep,
)
from tilenet.geometry.windows import Window
from tilenet.model.cellwise import CellwiseModule
from tilenet.model.dtypes import AUTOCAST
from tilenet.model.modules import BatchNorm, out_of_place
from tilenet.model.network import Network
from tilenet.model.resample import AxisPlace, resampled
from tilenet.model.skips import joined
from tilenet.parallel.exchange.halo import HaloChannel, HaloExchange, extend
from tilenet.parallel.exchange.layers import spatial_layer, without_border
from tilenet.parallel.exchange.placed import cells_placed

State = list[list[tuple[int, Tensor]]]
MapRows = tuple[int, int, Tensor]  # number of a map, first row, rows

WHOLE_IMAGE = nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d
WINDOWED = Conv | Pool | TransposedConv | Upsample


@dataclass(frozen=True)
class Columns:
    """The columns of each map that a rank holds, and the channel that brings those next to them.

    Attributes:
        shares: Shares of the ranks in each layer's maps along columns.
        number: The rank's place along columns.
        channel: The channel to the ranks left and right; a rank's number in it is its place.
    """

    shares: tuple[AxisShares, ...]
    number: int
    channel: HaloChannel

    def before(self, stop: int) -> "Columns":
        """The columns of the first `stop` layers."""
        return replace(self, shares=self.shares[:stop])

    @property
    def own(self) -> list[tuple[int, int]]:
        """The first own column and the end of them, for the image and for each layer's map.

        They do not hold for whole maps: all ranks have all their columns.
        """
        edges = [*(share.edges for share in self.shares), self.shares[-1].out_edges]
        return [(edge[self.number], edge[self.number + 1]) for edge in edges]


@dataclass
class KeptMaps:
    """Whole maps of an image, or of a rank's columns, that sweeps hand on to those after them.

    Attributes:
        after: Numbers of the maps that later sweeps need, by the layer to which a sweep goes.
        maps: The maps, (B, C, H, W), by number.
        incomplete: The maps that the current sweep keeps, and how many of their rows are there.
        empty: A strip of the image without rows, (B, bands, 0, W), once a strip was fed.
        read_rows: In backward, the rows of maps that the strip read: number, first row, rows.
        computed_rows: In backward, the rows of kept maps that it computed: number, rows, and the
            edge of the graph that their gradient enters.
    """

    after: Mapping[int, Collection[int]] = field(default_factory=dict)
    maps: dict[int, Tensor] = field(default_factory=dict)
    incomplete: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    empty: Tensor = field(init=False, repr=False)
    read_rows: list[tuple[int, int, Tensor]] = field(default_factory=list)
    computed_rows: list[tuple[int, Rows, GradientEdge]] = field(default_factory=list)

    def rows(self, number: int, rows: Rows) -> Tensor:
        """A copy of rows of a map, since layers may write over their input."""
        part = self.maps[number][:, :, rows[0] : rows[1]]
        if torch.is_grad_enabled() and part.requires_grad:  # not if all layers before are fixed
            part = part.detach().requires_grad_()
            self.read_rows.append((number, rows[0], part))
        return part.clone()

    def keep(self, number: int, first: int, part: Tensor, num_rows: int) -> None:
        """Keep rows of a map of `num_rows` rows, from row `first` on."""
        if torch.is_grad_enabled():
            if part.requires_grad:
                # The current edge: layers may write over the rows.
                rows = first, first + part.shape[2]
                self.computed_rows.append((number, rows, get_gradient_edge(part)))
            return
        whole, _ = self.incomplete.get(number, (None, 0))
        if whole is None:
            whole = part.new_empty((*part.shape[:2], num_rows, part.shape[3]))
        stop = first + part.shape[2]
        whole[:, :, first:stop] = part
        self.incomplete[number] = whole, stop

    @property
    def complete(self) -> dict[int, Tensor]:
        """Maps with all rows kept."""
        return {n: whole for n, (whole, stop) in self.incomplete.items() if stop == whole.shape[2]}

    def clear(self) -> None:
        """Drop all maps now: a sweep that still refers to this object is freed later."""
        self.maps, self.incomplete = {}, {}

    def finish(self, layer: int) -> None:
        """End the sweep to a layer: drop maps that are incomplete or not needed later."""
        needed = self.after.get(layer, ())
        self.maps = {n: map_ for n, map_ in (self.maps | self.complete).items() if n in needed}
        self.incomplete = {}


@dataclass(frozen=True)
class SweptPart:
    """The part of an image that is swept, and its strips.

    Attributes:
        size: Rows and columns of the image, extended to a multiple of the alignment.
        edges: Rows between strips, counted from the part's first, see `geometry.sweep`.
        window: The part, aligned on all sides; None for the whole image.
    """

    size: tuple[int, int]
    edges: Sequence[int]
    window: Window | None = None


class Sweep:
    """Computes the map of a part of an image; strips go in by `feed`, in order.

    Where the part ends inside the image, the output equals that of the image except in a halo, as
    a tile's does.

    Args:
        layers: A network with *same* padding, or its first layers.
        network: Network of these layers, in evaluation mode, on one device; statistics of whole
            images are given (`fixed.py`) or frozen.
        part: The part of the image.
        columns: The columns that this rank holds of the part, if other ranks hold the rest; then
            `feed` and `pass_strip` are collective. None if it holds all.
        precision: Precision of the arithmetic, see `Pipe`.
        compact: Whether rows of maps are dropped as soon as no later row needs them, at the price
            of copies.
        own: The consecutive layers that it computes, if others compute the rest; None for all.

    Attributes:
        rows_for_others: Rows of the last strip's maps that layers after its own look at.
        starts: Row and column of each map's first cell, on the map of the whole image.
        reads_image: Whether any layer needs the image's cells; not if kept maps replace them.

    Raises:
        TilenetError: A layer needs statistics of the whole image.
    """

    def __init__(
        self,
        layers: tuple[Layer, ...],
        network: Network,
        part: SweptPart,
        precision: str = "float32",
        columns: Columns | None = None,
        *,
        compact: bool = False,
        own: range | None = None,
    ) -> None:
        window = part.window or Window(0, 0, *part.size)
        self.layers, self.grids, self.own = layers, map_grids(layers), own or range(len(layers))
        self.strips = sweep(layers, part.edges, own)
        self._shapes = map_shapes(layers, window.height, window.width)
        self._image = map_shapes(layers, *part.size)
        self.starts = [grid.first_cell(window.row, window.col) for grid in self.grids]
        if columns is None:
            alone = axis_shares(across(layers), window.width, (0, window.width))
            self._columns = Columns(alone, 0, HaloChannel(None))
        else:
            self._columns = columns
            self.starts = [
                start if grid.whole else (start[0], first)
                for start, grid, (first, _) in zip(
                    self.starts, self.grids, columns.own, strict=True
                )
            ]
        self._widths = [stop - first for first, stop in self._columns.own]
        self._inputs = _inputs(layers)
        self._last_readers = last_readers(layers, own)
        modules = list(network)
        for number in self.own:  # other sweeps use its input too
            modules[number] = out_of_place(modules[number])
            if not isinstance(layers[number], Dropout):  # which may give its input itself
                break
        self._modules = {
            number: self._swept(layers[number], number, modules[number]) for number in self.own
        }
        readers = row_readers(layers)
        reads = frozenset[int]().union(*readers[self.own.start : self.own.stop])
        self._maps_for_others = frozenset[int]().union(*readers[self.own.stop :])
        self.rows_for_others: list[MapRows] = []
        # The rows that are held of each map, in the pieces that were added, with their first rows.
        self._pieces: list[list[tuple[int, Tensor]]] = [[] for _ in self._shapes]
        self._whole: dict[int, Tensor] = {}
        self._layer_rows: LayerRows
        self._like: Tensor  # (B, 0), with the dtype and device of the strips
        self._dtype, self._compact = AUTOCAST.get(precision), compact
        self._kept_maps, self.reads_image = KeptMaps(), own is None or 0 in reads
        self._computed_maps: Collection[int] = range(len(self._shapes))

    def use(self, kept_maps: KeptMaps) -> None:
        """Use the maps that sweeps of the same part and columns kept, and keep new ones there."""
        self._kept_maps = kept_maps
        self._computed_maps, read = maps_before(self.layers, [len(self.layers)], kept_maps.maps)
        self.reads_image = 0 in read or not kept_maps.maps

    def blanks(self, windows: Sequence[Window]) -> nullcontext[Iterator[Tensor]]:
        """Strips to feed if no layer needs the image: of its shape and dtype, without memory."""
        batch, bands, _, width = self._kept_maps.empty.shape
        cell = self._kept_maps.empty.new_empty(())
        return nullcontext(cell.expand(batch, bands, part.height, width) for part in windows)

    def _swept(self, layer: Layer, number: int, module: nn.Module) -> nn.Module:
        whole = isinstance(module, nn.InstanceNorm2d | nn.GroupNorm | WHOLE_IMAGE)
        if (whole or (isinstance(module, BatchNorm) and module.training)) and not (
            self.grids[number].whole
        ):
            raise TilenetError(
                f"a sweep takes statistics of the whole image as given (layer {number}: "
                f"{layer.kind}); find them first"
            )
        placed = cells_placed(module, lambda _: self._place(number))
        if placed and not self.grids[number].whole:
            return placed
        windowed = isinstance(layer, WINDOWED) and not by_corners(layer)
        if windowed and not self.grids[number].whole:
            return spatial_layer(layer, number, module, self)
        return module

    def _place(self, layer: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """First row and column that a layer computes, on the map of the whole image; its size."""
        (top, left), image = self.starts[layer + 1], self._image[layer + 1]
        return (top + self._layer_rows.out[0], left), (image.rows, image.cols)

    def _needed_rows(self, layer: int) -> Rows:
        """Rows of its input that the layer needs, clamped to the map."""
        low, high = self._layer_rows.need
        rows = self._shapes[layer].rows
        return min(max(low, 0), rows), max(min(high, rows), 0)

    def exchange(self, layer: int) -> HaloExchange:
        """The layer's exchange: rows that are held here, and columns of other ranks."""
        now, cols = self._layer_rows, self._columns
        rows = AxisShares(
            Fraction(1), self._shapes[layer].rows, self._needed_rows(layer), now.out, (now.need,)
        )
        return HaloExchange(
            halo_of(rows, cols.shares[layer], (0, cols.number)), cols.channel, 2 * layer
        )

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows that are kept for later strips."""
        pieces = (piece for pieces in self._pieces for _, piece in pieces)
        storages = (piece.untyped_storage() for piece in pieces)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def feed(self, strip: Tensor | None) -> Tensor:
        """Compute the output's rows that a strip completes.

        Args:
            strip: The next rows of the image, (B, bands, H, W); None after the last one.

        Returns:
            (B, classes, H′, W); H′ may be 0.
        """
        if strip is None:
            strip = self._kept_maps.empty
        self._kept_maps.empty = strip.new_empty((*strip.shape[:2], 0, strip.shape[3]))
        with torch.inference_mode():
            return self.pass_strip(strip, next(self.strips))

    @property
    def state(self) -> State:
        """The rows that are held of each map, with the number of the first one."""
        return [list(pieces) for pieces in self._pieces]

    @state.setter
    def state(self, state: State) -> None:
        self._pieces = [list(pieces) for pieces in state]
        self._whole = {}  # computed again in backward

    def pass_strip(self, strip: Tensor, plan: Strip, arrived: Iterable[MapRows] = ()) -> Tensor:
        """Compute a strip of `strips` as `feed` does, after the strips that led to the state.

        Args:
            arrived: The next rows of maps that its layers need and others compute.
        """
        self.rows_for_others = []
        for number, first, rows in arrived:
            self._pieces[number].append((first, rows))
        with torch.autocast(
            strip.device.type, self._dtype, enabled=self._dtype is not None, cache_enabled=False
        ):
            return self._compute_strip(strip, plan)

    def _compute_strip(self, strip: Tensor, plan: Strip) -> Tensor:
        self._like = strip.new_empty(len(strip), 0)
        if strip.shape[2] and self.reads_image:
            self._pieces[0].append((plan.image[0], strip))
        for number in self.own:
            layer, rows = self.layers[number], plan.layers[number]
            self._layer_rows = rows
            if self.grids[number + 1].whole:
                if number + 1 not in self._whole:
                    self._whole[number + 1] = self._of_whole_image(number, layer, strip)
            elif rows.out[0] < rows.out[1]:
                self._add(number, layer, rows)
            for map_ in self._last_readers[number]:
                self._drop_rows(map_, plan.held[map_][0])
        pieces = self._pieces[-1]
        if len(self.layers) in self._kept_maps.maps:
            return self._kept_maps.rows(len(self.layers), plan.output)
        if not pieces:
            return strip.new_empty(len(strip), self._shapes[-1].channels, 0, self._widths[-1])
        return pieces.pop()[1]

    def _add(self, number: int, layer: Layer, rows: LayerRows) -> None:
        """Compute rows of a layer's map."""
        map_, first = number + 1, rows.out[0]
        if map_ not in self._computed_maps:
            return
        map_rows = self._computed(number, layer, rows)
        if map_ in self._kept_maps.after.get(len(self.layers), ()):
            self._kept_maps.keep(map_, first, map_rows, self._shapes[map_].rows)
        self._pieces[map_].append((first, map_rows))
        if map_ in self._maps_for_others:
            self.rows_for_others.append((map_, first, map_rows))

    def _drop_rows(self, number: int, first: int) -> None:
        """Drop a map's rows before `first`."""
        pieces = self._pieces[number]
        while pieces and pieces[0][0] + pieces[0][1].shape[2] <= first:
            del pieces[0]
        least = 0 if self._compact else pieces[0][1].shape[2] // 2 if pieces else 0
        if pieces and (gone := first - pieces[0][0]) > least:
            # A part of a tensor keeps all of it in memory.
            pieces[0] = first, pieces[0][1][:, :, gone:].clone()

    def _rows(self, number: int, rows: Rows) -> Tensor:
        """Rows of a map; all rows of a whole one."""
        if self.grids[number].whole:
            return self._whole[number]
        if number in self._kept_maps.maps:
            return self._kept_maps.rows(number, rows)
        start, stop = rows
        # The piece itself instead of a view of all its rows: writing over a view takes copies in
        # backward.
        parts = [
            piece
            if start <= first and first + piece.shape[2] <= stop
            else piece[:, :, max(start - first, 0) : stop - first]
            for first, piece in self._pieces[number]
            if first < stop and start < first + piece.shape[2]
        ]
        assert sum(part.shape[2] for part in parts) == stop - start, "rows come before they are due"
        if not parts:  # the layer sees padding only
            shape = len(self._like), self._shapes[number].channels, 0, self._widths[number]
            return self._like.new_empty(shape)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _of_whole_image(self, number: int, layer: Layer, strip: Tensor) -> Tensor:
        """A map without rows of its own, such as averages, which are fixed."""
        if isinstance(layer, GlobalPool) and not self.grids[number].whole:
            out: Tensor = self._modules[number](strip)
            return out
        return self._computed(number, layer, LayerRows((0, 0), (0, 0)))

    def _computed(self, number: int, layer: Layer, rows: LayerRows) -> Tensor:
        inputs = self._inputs[number]
        match layer:
            case Stash():
                return self._rows(number, rows.out)
            case Join():
                others = [self._rows(map_, rows.out) for map_ in inputs[1:]]
                x = others[0] if layer.how == "take" else self._rows(number, rows.out)
                return joined(layer, x, others)
            case Cellwise() if layer.kept:
                others = [self._rows(map_, rows.out) for map_ in inputs[1:]]
                module = cast(CellwiseModule, self._modules[number].module)
                return module.compute(self._rows(number, rows.out), others)
            case Expand():
                way = layer.mode, layer.corners
                return self._resampled(number, self._rows(number, rows.out), (0, 0), way)
            case _ if by_corners(layer) and not self.grids[number].whole:
                return self._with_corners(number)
        if isinstance(layer, WINDOWED) and not self.grids[number].whole:
            return self._run(number, self._rows(number, self._needed_rows(number)))
        return self._run(number, self._rows(number, rows.out))

    def _run(self, number: int, x: Tensor) -> Tensor:
        out: Tensor = self._modules[number](x)
        return out

    def _with_corners(self, number: int) -> Tensor:
        exchange, rows = without_border(self.exchange(number)), self._needed_rows(number)
        x, halo, first = self._rows(number, rows), exchange.halo, 0
        if halo.takes or halo.gives:
            x, first = extend(x, exchange, 0.0), halo.need.col - halo.own.col
        return self._resampled(number, x, (rows[0], first), ("bilinear", True))

    def _resampled(
        self, number: int, x: Tensor, first: tuple[int, int], way: tuple[str, bool]
    ) -> Tensor:
        """Rows of a resampled map, aligned as on the whole image.

        Args:
            first: Row and column of the first cell of `x`, on its map.
            way: Mode, and whether corners are aligned, as for `resampled`.
        """
        start, stop = self._layer_rows.out
        (top, left), (out_top, out_left) = self.starts[number], self.starts[number + 1]
        before, after = self._image[number], self._image[number + 1]
        along = AxisPlace(top + first[0], before.rows, out_top + start, stop - start, after.rows)
        across = AxisPlace(
            left + first[1], before.cols, out_left, self._widths[number + 1], after.cols
        )
        return resampled(x, along, across, way[0], corners=way[1])


def _inputs(layers: tuple[Layer, ...]) -> list[tuple[int, ...]]:
    """Return the maps that each layer reads: its own input, then the stashed ones."""
    stashed: dict[str, int] = {}
    inputs = []
    for number, layer in enumerate(layers):
        inputs.append((number, *(stashed.pop(name) for name in layer.names)))
        if isinstance(layer, Stash):
            stashed[layer.name] = number
    return inputs
