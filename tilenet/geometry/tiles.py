"""Cut the pixel grid into tiles, each with the window that it reads and the window that it owns.

Own windows partition the *extended* raster exactly once: training counts the loss over own pixels,
prediction writes them. The extended raster is the raster with height and width rounded up to the
alignment; pixels beyond the raster are its reflection (`reflected`), which losses and maps ignore.
Rows and columns are cut alike, so the work is done per axis, on spans.
"""

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, TypeVar, overload

from tilenet.errors import TilenetError
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.maps import output_size
from tilenet.geometry.pieces import parts
from tilenet.geometry.symmetries import Symmetry
from tilenet.geometry.windows import Window

T = TypeVar("T")  # a numpy array or a torch tensor; this room imports neither


@dataclass(frozen=True)
class Tile:
    """A pair of windows: `read` (with halo) and `own`."""

    read: Window
    own: Window


@dataclass(frozen=True)
class Span:
    """A tile along one axis: it reads `read` pixels from `start`, and owns `own` from `first`."""

    start: int
    read: int
    first: int
    own: int


@dataclass(frozen=True)
class Cut:
    """The number of tiles along each axis, or the largest own size of a tile."""

    grid: tuple[int, int] | None = None
    size_px: int | None = None


class Tiles(Sequence[Tile]):
    """Tiles, row by row, each made when it is needed: a huge image has millions."""

    def __init__(self, rows: tuple[Span, ...], cols: tuple[Span, ...]) -> None:
        self._rows, self._cols = rows, cols

    def __len__(self) -> int:
        return len(self._rows) * len(self._cols)

    @overload
    def __getitem__(self, number: int) -> Tile: ...
    @overload
    def __getitem__(self, number: slice) -> list[Tile]: ...
    def __getitem__(self, number: int | slice) -> Tile | list[Tile]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        place = range(len(self))[number]
        row, col = self._rows[place // len(self._cols)], self._cols[place % len(self._cols)]
        return Tile(
            read=Window(row.start, col.start, row.read, col.read),
            own=Window(row.first, col.first, row.own, col.own),
        )


@dataclass(frozen=True)
class Tiling:
    """A raster cut into tiles.

    Attributes:
        rows: One span per row of tiles.
        cols: One span per column of tiles.
        rule: The rule that gave the read windows.
    """

    height: int
    width: int
    rows: tuple[Span, ...]
    cols: tuple[Span, ...]
    rule: HaloRule

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles along rows and along columns."""
        return len(self.rows), len(self.cols)

    @property
    def extended(self) -> tuple[int, int]:
        """Height and width rounded up to the alignment."""
        return _ends(self.rows), _ends(self.cols)

    @property
    def tiles(self) -> "Tiles":
        """All tiles, row by row."""
        return Tiles(self.rows, self.cols)

    def number(self, own: Window) -> int:
        """The number of the tile that owns this window, row by row."""
        row = bisect(self.rows, own.row, key=lambda span: span.first) - 1
        col = bisect(self.cols, own.col, key=lambda span: span.first) - 1
        return row * len(self.cols) + col

    @property
    def largest_own(self) -> tuple[int, int]:
        """Most rows and most columns that a tile owns."""
        return max(span.own for span in self.rows), max(span.own for span in self.cols)

    @property
    def largest_read(self) -> tuple[int, int]:
        """Most rows and most columns that a tile reads."""
        return max(span.read for span in self.rows), max(span.read for span in self.cols)

    @property
    def work_ratio(self) -> float:
        """Pixels read by all tiles, per pixel of the raster."""
        read = sum(span.read for span in self.rows) * sum(span.read for span in self.cols)
        return read / (self.height * self.width)

    @property
    def work_ratio_tile(self) -> float:
        """The paper's E = (T/T′)² of the largest tile: pixels read per pixel owned."""
        return self.rows[0].read * self.cols[0].read / prod(self.largest_own)


def _ends(spans: tuple[Span, ...]) -> int:
    return spans[-1].first + spans[-1].own


def cut(height: int, width: int, tiles: Cut, rule: HaloRule) -> Tiling:
    """Cut a raster of `height` × `width` pixels into tiles.

    Raises:
        TilenetError: The raster is empty, or the tiles asked for are smaller than the alignment.
    """
    rows, cols = tiles.grid or (None, None)
    return Tiling(
        height=height,
        width=width,
        rows=_spans(height, "rows", rows, tiles.size_px, rule),
        cols=_spans(width, "columns", cols, tiles.size_px, rule),
        rule=rule,
    )


def _spans(
    pixels: int, axis: str, parts: int | None, size_px: int | None, rule: HaloRule
) -> tuple[Span, ...]:
    if pixels < 1:
        raise TilenetError(f"a raster must have at least one pixel a side ({axis}: {pixels})")
    unit = rule.alignment_px
    units = -(-pixels // unit)
    if size_px is not None:
        if size_px < unit:
            raise TilenetError(
                f"a tile must own at least one alignment unit, the network's total stride (tile: "
                f"{size_px} px, alignment: {unit} px); nearest legal tile: {unit}"
            )
        parts = -(-units // (size_px // unit))
    parts = 1 if parts is None else parts
    if parts < 1:
        raise TilenetError(f"a grid has at least one tile a side ({axis}: {parts}); nearest: 1")
    if parts > units:
        raise TilenetError(
            f"each tile must own at least one alignment unit ({axis}: {parts} tiles over {pixels} "
            f"px, alignment: {unit} px); at most {units} tiles are possible"
        )
    # The balanced rule: sizes differ by at most one unit, none is empty.
    edges = [unit * (units * part // parts) for part in range(parts + 1)]
    widest = max(b - a for a, b in pairwise(edges))
    return tuple(_span(a, b - a, widest, units * unit, rule) for a, b in pairwise(edges))


def _span(first: int, own: int, widest: int, extended: int, rule: HaloRule) -> Span:
    if rule.exchanged:
        return Span(start=first, read=own, first=first, own=own)
    if rule.valid_layers:
        inset = rule.halo_px - rule.offset_px
        read = _legal_size(rule, inset + widest, widest + 2 * rule.halo_px)
        return Span(start=first - rule.halo_px, read=read, first=first, own=own)
    # Never over the edge, where every layer of a same-padded network puts its own zeros: near it
    # the window keeps its size and is shifted inside, so that all tiles can be stacked.
    read = min(widest + 2 * rule.halo_px, extended)
    start = min(max(first - rule.halo_px, 0), extended - read)
    return Span(start=start, read=read, first=first, own=own)


def turned_tiling(tiling: Tiling, symmetry: Symmetry) -> Tiling:
    """Return the tiles of a turned image; each owns all pixels that one tile of the image owns.

    The network's grid begins at the turned image's own first pixel. So where it is flipped, a
    tile's own pixels are rounded up to the grid on both sides, and neighbours own some twice.
    """
    height, width = symmetry.size(tiling.height, tiling.width)
    rows, cols = (tiling.cols, tiling.rows) if symmetry.transposed else (tiling.rows, tiling.cols)
    if symmetry.flips_rows:
        rows = _flipped(rows, height, tiling.rule)
    if symmetry.flips_cols:
        cols = _flipped(cols, width, tiling.rule)
    return Tiling(height, width, rows, cols, tiling.rule)


def _flipped(spans: tuple[Span, ...], pixels: int, rule: HaloRule) -> tuple[Span, ...]:
    unit = rule.alignment_px
    edges = [
        (
            max(pixels - span.first - span.own, 0) // unit * unit,
            -(-(pixels - span.first) // unit) * unit,
        )
        for span in reversed(spans)
    ]
    widest, extended = max(b - a for a, b in edges), -(-pixels // unit) * unit
    return tuple(_span(a, b - a, widest, extended, rule) for a, b in edges)


def _legal_size(rule: HaloRule, output: int, smallest: int) -> int:
    """Smallest input from `smallest` on that an unpadded network takes and that gives `output`."""
    # Legal sizes come once per alignment; twice that covers the extra that `output` may need.
    sizes = range(smallest, smallest + 2 * rule.alignment_px + 1)
    for size in sizes:
        if output_size(rule.valid_layers, size, exact=True) >= output:
            return size
    raise TilenetError(
        f"an unpadded network takes only sizes that every pooling halves without a remainder, and "
        f"none from {sizes[0]} to {sizes[-1]} px is one; use padding: same"
    )


def owned(array: T, tile: Tile, offset_px: int = 0) -> T:
    """Return the part of an array (…, H, W) that stands on the pixels a tile owns.

    Args:
        array: numpy or torch, over the tile's read window or a network's output for it.
        offset_px: Pixel of the read window that the array's first cell stands on.
    """
    sliceable: Any = array
    part: T = sliceable[own_index(tile, offset_px)]
    return part


def own_index(tile: Tile, offset_px: int) -> tuple[Any, slice, slice]:
    """The index with which `owned` takes its part."""
    top = tile.own.row - tile.read.row - offset_px
    left = tile.own.col - tile.read.col - offset_px
    return ..., slice(top, top + tile.own.height), slice(left, left + tile.own.width)


def own_pieces(tiling: Tiling, height_px: int, width_px: int) -> Iterator[tuple[int, Window]]:
    """Windows of at most `height_px` × `width_px` that partition all own windows.

    Strip by strip from the top, left to right, each with the number of the tile that owns it.
    Pieces end at multiples of their sizes, where the blocks of the map's file end too.
    """
    num_cols = len(tiling.cols)
    for row, rows in enumerate(tiling.rows):
        for top, height in parts(rows.first, rows.own, height_px):
            for col, cols in enumerate(tiling.cols):
                for left, width in parts(cols.first, cols.own, width_px):
                    yield row * num_cols + col, Window(top, left, height, width)
