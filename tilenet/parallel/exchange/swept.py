"""A network over an image from top to bottom, strip by strip; what a strip lacks was kept before.

The layers are those of the exchange, which take halos from neighbours in space: here the rows that
they look at are at hand, as `geometry.sweep` says what to keep. Columns are too, or ranks hold
their own ones each, and a layer takes those next to them from the neighbours.
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
from tilenet.geometry.grid import Grid
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
from tilenet.model.choices import AUTOCAST
from tilenet.model.modules import BatchNorm, out_of_place
from tilenet.model.network import Network
from tilenet.model.resample import AxisPlace, resampled
from tilenet.model.skips import joined
from tilenet.parallel.exchange.halo import HaloChannel, HaloExchange, extend
from tilenet.parallel.exchange.layers import spatial_layer, without_border
from tilenet.parallel.exchange.placed import cells_placed

__all__ = ["Columns", "KeptMaps", "MapRows", "State", "Sweep", "SweptPart"]

State = list[list[tuple[int, Tensor]]]
MapRows = tuple[int, int, Tensor]  # number of a map, first row, rows

WHOLE_IMAGE = nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d
WINDOWED = Conv | Pool | TransposedConv | Upsample


@dataclass(frozen=True)
class Columns:
    """Which columns of each map a rank holds, and from whom it takes what it lacks.

    Attributes:
        shares: How ranks share each layer's maps along columns.
        number: The rank's place along them.
        line: To the ranks left and right, whose numbers in it are their places.
    """

    shares: tuple[AxisShares, ...]
    number: int
    channel: HaloChannel

    def before(self, stop: int) -> "Columns":
        """Those of the first layers."""
        return replace(self, shares=self.shares[:stop])

    @property
    def own(self) -> list[tuple[int, int]]:
        """Of the image and of each layer's map the first column, and the one behind the last.

        Not of whole maps, of which all ranks have all.
        """
        edges = [*(one.edges for one in self.shares), self.shares[-1].out_edges]
        return [(one[self.number], one[self.number + 1]) for one in edges]


@dataclass
class KeptMaps:
    """Whole maps of an image, or of a rank's columns, that sweeps hand on to those after them.

    Attributes:
        after: For a sweep to each layer the numbers of the maps that those after it need.
        there: The maps, (B, C, H, W), by number.
        coming: Those that the sweep at hand keeps, and how many of their rows have come.
        empty: A strip of the image without rows, (B, bands, 0, W), once one was fed.
        taken: In backward the rows that the strip takes of maps: number, first row, rows.
        given: In backward the rows that it computes of maps that are kept: number, rows, and where
            their gradient goes.
    """

    after: Mapping[int, Collection[int]] = field(default_factory=dict)
    there: dict[int, Tensor] = field(default_factory=dict)
    coming: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    empty: Tensor = field(init=False, repr=False)
    taken: list[tuple[int, int, Tensor]] = field(default_factory=list)
    given: list[tuple[int, Rows, GradientEdge]] = field(default_factory=list)

    def rows(self, number: int, rows: Rows) -> Tensor:
        """Rows of a map, a copy, since layers may write over their input."""
        found = self.there[number][:, :, rows[0] : rows[1]]
        if torch.is_grad_enabled() and found.requires_grad:  # it is not where all before is fixed
            found = found.detach().requires_grad_()
            self.taken.append((number, rows[0], found))
        return found.clone()

    def keep(self, number: int, first: int, found: Tensor, num_rows: int) -> None:
        """Keep rows of a map from the first one on."""
        if torch.is_grad_enabled():
            if found.requires_grad:
                # As it is now: layers may write over it.
                rows = first, first + found.shape[2]
                self.given.append((number, rows, get_gradient_edge(found)))
            return
        whole, _ = self.coming.get(number, (None, 0))
        if whole is None:
            whole = found.new_empty((*found.shape[:2], num_rows, found.shape[3]))
        stop = first + found.shape[2]
        whole[:, :, first:stop] = found
        self.coming[number] = whole, stop

    @property
    def come(self) -> dict[int, Tensor]:
        """Those that the sweep has kept whole."""
        return {n: whole for n, (whole, stop) in self.coming.items() if stop == whole.shape[2]}

    def clear(self) -> None:
        """Drop all maps now: a sweep that still refers to this object is freed later."""
        self.there, self.coming = {}, {}

    def finish(self, layer: int) -> None:
        """After the sweep to a layer: let go of maps that did not come whole or are not needed."""
        needed = self.after.get(layer, ())
        self.there = {n: one for n, one in (self.there | self.come).items() if n in needed}
        self.coming = {}


@dataclass(frozen=True)
class SweptPart:
    """What is swept of an image, and in which strips.

    Attributes:
        size: Rows and columns of the image, extended to a multiple of the alignment.
        edges: Rows between strips, counted from the part's first, see `geometry.sweep`.
        window: From multiples of the alignment to others; None: the whole image.
    """

    size: tuple[int, int]
    edges: Sequence[int]
    window: Window | None = None


class Sweep:
    """Makes the map of a part of an image; strips go in by `feed`, in order.

    Where the part ends inside the image, the output is that of the image but for a halo, as a
    tile's is.

    Args:
        layers: A network with *same* padding, or its first layers.
        network: Of these layers, in evaluation mode, on one device; statistics of whole images are
            given (`fixed.py`) or frozen.
        part: Which part of the image.
        columns: Those that this rank holds of the part, where others hold the rest; None: it holds
            all. Then `feed` and `pass_strip` are collective.
        precision: As for `Pipe`.
        compact: Whether of each map just the rows are kept that rows to come look at, at the price
            of copies.
        own: The layers that it computes, consecutive ones, where others compute the rest; None:
            all.

    Attributes:
        made: Of the last strip the rows of maps that layers behind its own look at.
        starts: Row and column of each map's first cell, on the map of the whole image.
        looks: Whether any layer looks at the image's cells; not where kept maps stand in for it.

    Raises:
        TilenetError: A layer needs something of the whole image.
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
        self.starts = [_first_cells(grid, window) for grid in self.grids]
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
        self._done_with = last_readers(layers, own)
        modules = list(network)
        for number in self.own:  # others have its input too
            modules[number] = out_of_place(modules[number])
            if not isinstance(layers[number], Dropout):  # which may give its input itself
                break
        self._modules = {
            number: self._swept(layers[number], number, modules[number]) for number in self.own
        }
        readers = row_readers(layers)
        reads = frozenset[int]().union(*readers[self.own.start : self.own.stop])
        self._asked = frozenset[int]().union(*readers[self.own.stop :])
        self.made: list[MapRows] = []
        # Rows that are held of each map, in the pieces in which they came, with their first rows.
        self._pieces: list[list[tuple[int, Tensor]]] = [[] for _ in self._shapes]
        self._whole: dict[int, Tensor] = {}
        self._now: LayerRows
        self._like: Tensor  # as many as images, of their kind and without cells
        self._dtype, self._compact = AUTOCAST.get(precision), compact
        self._kept, self.looks = KeptMaps(), own is None or 0 in reads
        self._computed_maps: Collection[int] = range(len(self._shapes))

    def use(self, kept: KeptMaps) -> None:
        """Take the maps that sweeps of the same part and columns kept, and keep others."""
        self._kept = kept
        self._computed_maps, read = maps_before(self.layers, [len(self.layers)], kept.there)
        self.looks = 0 in read or not kept.there

    def blanks(self, windows: Sequence[Window]) -> nullcontext[Iterator[Tensor]]:
        """Strips to feed where no layer looks at them: of the image's kind, without memory."""
        batch, bands, _, width = self._kept.empty.shape
        cell = self._kept.empty.new_empty(())
        return nullcontext(cell.expand(batch, bands, one.height, width) for one in windows)

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
        spatial = isinstance(layer, WINDOWED) and not by_corners(layer)
        if spatial and not self.grids[number].whole:
            return spatial_layer(layer, number, module, self)
        return module

    def _place(self, layer: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Where the rows that a layer computes begin, on the map of the whole image; its size."""
        (top, left), image = self.starts[layer + 1], self._image[layer + 1]
        return (top + self._now.out[0], left), (image.rows, image.cols)

    def _seen(self, layer: int) -> Rows:
        """Rows of its input that the layer looks at, in the map."""
        low, high = self._now.need
        rows = self._shapes[layer].rows
        return min(max(low, 0), rows), max(min(high, rows), 0)

    def exchange(self, layer: int) -> HaloExchange:
        """What the layer looks at: rows that are here, and columns of others."""
        now, cols = self._now, self._columns
        rows = AxisShares(
            Fraction(1), self._shapes[layer].rows, self._seen(layer), now.out, (now.need,)
        )
        return HaloExchange(
            halo_of(rows, cols.shares[layer], (0, cols.number)), cols.channel, 2 * layer
        )

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows that are kept for strips to come."""
        pieces = (piece for pieces in self._pieces for _, piece in pieces)
        storages = (piece.untyped_storage() for piece in pieces)
        return sum({one.data_ptr(): one.nbytes() for one in storages}.values())

    def feed(self, strip: Tensor | None) -> Tensor:
        """The output's rows that a strip completes.

        Args:
            strip: The next rows of the image, (B, bands, H, W); None: they have all come.

        Returns:
            (B, classes, H′, W); H′ may be 0.
        """
        if strip is None:
            strip = self._kept.empty
        self._kept.empty = strip.new_empty((*strip.shape[:2], 0, strip.shape[3]))
        with torch.inference_mode():
            return self.pass_strip(strip, next(self.strips))

    @property
    def state(self) -> State:
        """The rows that are held, with their first rows."""
        return [list(pieces) for pieces in self._pieces]

    @state.setter
    def state(self, state: State) -> None:
        self._pieces = [list(pieces) for pieces in state]
        self._whole = {}  # computed again, for another backward

    def pass_strip(self, strip: Tensor, plan: Strip, come: Iterable[MapRows] = ()) -> Tensor:
        """As `feed`, for a strip of `strips` after those that led to the state.

        Args:
            come: The next rows of maps that its layers look at and others compute.
        """
        self.made = []
        for number, first, rows in come:
            self._pieces[number].append((first, rows))
        with torch.autocast(strip.device.type, self._dtype, enabled=self._dtype is not None):
            return self._fed(strip, plan)

    def _fed(self, strip: Tensor, plan: Strip) -> Tensor:
        self._like = strip.new_empty(len(strip), 0)
        if strip.shape[2] and self.looks:
            self._pieces[0].append((plan.image[0], strip))
        for number in self.own:
            layer, rows = self.layers[number], plan.layers[number]
            self._now = rows
            if self.grids[number + 1].whole:
                if number + 1 not in self._whole:
                    self._whole[number + 1] = self._of_whole_image(number, layer, strip)
            elif rows.out[0] < rows.out[1]:
                self._add(number, layer, rows)
            for map_ in self._done_with[number]:
                self._let_go(map_, plan.held[map_][0])
        pieces = self._pieces[-1]
        if len(self.layers) in self._kept.there:
            return self._kept.rows(len(self.layers), plan.output)
        if not pieces:
            return strip.new_empty(len(strip), self._shapes[-1].channels, 0, self._widths[-1])
        return pieces.pop()[1]

    def _add(self, number: int, layer: Layer, rows: LayerRows) -> None:
        """Compute rows of a layer's map."""
        map_, first = number + 1, rows.out[0]
        if map_ not in self._computed_maps:
            return
        found = self._computed(number, layer, rows)
        if map_ in self._kept.after.get(len(self.layers), ()):
            self._kept.keep(map_, first, found, self._shapes[map_].rows)
        self._pieces[map_].append((first, found))
        if map_ in self._asked:
            self.made.append((map_, first, found))

    def _let_go(self, number: int, first: int) -> None:
        """Let rows before the first one go."""
        pieces = self._pieces[number]
        while pieces and pieces[0][0] + pieces[0][1].shape[2] <= first:
            del pieces[0]
        least = 0 if self._compact else pieces[0][1].shape[2] // 2 if pieces else 0
        if pieces and (gone := first - pieces[0][0]) > least:
            # A part of a tensor keeps all of it in memory.
            pieces[0] = first, pieces[0][1][:, :, gone:].clone()

    def _rows(self, number: int, rows: Rows) -> Tensor:
        """Rows of a map; all of a whole one."""
        if self.grids[number].whole:
            return self._whole[number]
        if number in self._kept.there:
            return self._kept.rows(number, rows)
        start, stop = rows
        # A piece as it is, not a view of all of it: in backward, writing over a view takes copies.
        found = [
            piece
            if start <= first and first + piece.shape[2] <= stop
            else piece[:, :, max(start - first, 0) : stop - first]
            for first, piece in self._pieces[number]
            if first < stop and start < first + piece.shape[2]
        ]
        assert sum(one.shape[2] for one in found) == stop - start, "rows come before they are due"
        if not found:  # padding alone is looked at
            shape = len(self._like), self._shapes[number].channels, 0, self._widths[number]
            return self._like.new_empty(shape)
        return found[0] if len(found) == 1 else torch.cat(found, 2)

    def _of_whole_image(self, number: int, layer: Layer, strip: Tensor) -> Tensor:
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
            case Cellwise() if layer.kept:
                kept = [self._rows(one, rows.out) for one in taken[1:]]
                module = cast(CellwiseModule, self._modules[number].module)
                return module.compute(self._rows(number, rows.out), kept)
            case Expand():
                way = layer.mode, layer.corners
                return self._resampled(number, self._rows(number, rows.out), (0, 0), way)
            case _ if by_corners(layer) and not self.grids[number].whole:
                return self._with_corners(number)
        if isinstance(layer, WINDOWED) and not self.grids[number].whole:
            return self._run(number, self._rows(number, self._seen(number)))
        return self._run(number, self._rows(number, rows.out))

    def _run(self, number: int, x: Tensor) -> Tensor:
        out: Tensor = self._modules[number](x)
        return out

    def _with_corners(self, number: int) -> Tensor:
        exchange, seen = without_border(self.exchange(number)), self._seen(number)
        x, halo, first = self._rows(number, seen), exchange.halo, 0
        if halo.takes or halo.gives:
            x, first = extend(x, exchange, 0.0), halo.need.col - halo.own.col
        return self._resampled(number, x, (seen[0], first), ("bilinear", True))

    def _resampled(
        self, number: int, x: Tensor, first: tuple[int, int], way: tuple[str, bool]
    ) -> Tensor:
        """Rows of a map of another size, of cells from `first` on; both lie as on the image.

        Args:
            way: Mode and whether it is by corners, as for `resampled`.
        """
        start, stop = self._now.out
        (top, left), (out_top, out_left) = self.starts[number], self.starts[number + 1]
        before, after = self._image[number], self._image[number + 1]
        along = AxisPlace(top + first[0], before.rows, out_top + start, stop - start, after.rows)
        across = AxisPlace(
            left + first[1], before.cols, out_left, self._widths[number + 1], after.cols
        )
        return resampled(x, along, across, way[0], corners=way[1])


def _first_cells(grid: Grid, part: Window) -> tuple[int, int]:
    """Row and column of the map's first cell of a part of the image."""
    return (0, 0) if grid.whole else (int(part.row / grid.stride), int(part.col / grid.stride))


def _inputs(layers: tuple[Layer, ...]) -> list[tuple[int, ...]]:
    """For each layer the maps that it takes: its own input, then the kept ones."""
    kept: dict[str, int] = {}
    found = []
    for number, layer in enumerate(layers):
        found.append((number, *(kept.pop(name) for name in layer.names)))
        if isinstance(layer, Stash):
            kept[layer.name] = number
    return found
