"""Memory of a sweep for a map: rows that are kept, and input and output of a layer."""

from dataclasses import dataclass, field
from functools import lru_cache

from tilenet.geometry.layers import Layer, Stash
from tilenet.geometry.maps import map_grids, map_shapes
from tilenet.geometry.sweep import LayerRows, last_readers, row_readers, strip_edges, sweep

FULL_STRIPS = 4  # that complete as many rows as come in, until nothing new is to be seen


@lru_cache(maxsize=256)  # many images are of one width
def swept_bytes(
    layers: tuple[Layer, ...], height: int, width: int, strip_rows: int, item_bytes: int
) -> int:
    """Most bytes of feature maps that live at one time while a part of an image is swept.

    Counted are kept rows, in the pieces that they came in, the input of the layer at hand where it
    is put together from pieces, and its output; not the convolution's workspace.
    """
    held = _Held(layers, height, width)
    most = full = 0
    for strip in sweep(layers, strip_edges(height, strip_rows)):
        held.add(0, *strip.image)
        held.received = held.maps[0][-1:]  # its caller holds it
        for number, rows in enumerate(strip.layers):
            taken = held.taken(number, rows)
            held.give(number, rows)
            most = max(most, held.cells + taken)
            for map_ in held.done_with[number]:
                held.let_go(map_, strip.held[map_][0])
        held.maps[-1].clear()
        full += strip.output[1] - strip.output[0] >= strip_rows
        if full > FULL_STRIPS:
            break
    return most * item_bytes


@dataclass
class Piece:
    """Rows of a map; pieces of one storage lie in the same memory."""

    first: int
    rows: int
    storage: int


@dataclass
class _Held:
    """The pieces that a sweep holds, in cells."""

    layers: tuple[Layer, ...]
    height: int
    width: int
    sizes: dict[int, int] = field(default_factory=dict)  # of storages that were ever made

    def __post_init__(self) -> None:
        self.shapes = map_shapes(self.layers, self.height, self.width)
        self.whole = [grid.whole for grid in map_grids(self.layers)]
        self.reads = row_readers(self.layers)
        self.maps: list[list[Piece]] = [[] for _ in self.shapes]
        self.received: list[Piece] = []
        self.done_with = last_readers(self.layers)

    def _new(self, number: int, rows: int) -> int:
        storage = len(self.sizes)
        self.sizes[storage] = rows * self.shapes[number].cols * self.shapes[number].channels
        return storage

    def add(self, number: int, first: int, stop: int) -> None:
        """A piece of a map comes."""
        if first < stop:
            self.maps[number].append(Piece(first, stop - first, self._new(number, stop - first)))

    def give(self, number: int, rows: LayerRows) -> None:
        """Add the output rows of a layer; a stash hands on the rows that it received."""
        (first, stop), layer = rows.out, self.layers[number]
        inside = [p for p in self.maps[number] if p.first <= first < p.first + p.rows]
        if isinstance(layer, Stash) and inside and stop <= inside[0].first + inside[0].rows:
            self.maps[number + 1].append(Piece(first, stop - first, inside[0].storage))
        elif not self.whole[number + 1]:
            self.add(number + 1, first, stop)

    def taken(self, number: int, rows: LayerRows) -> int:
        """Return the cells of a layer's inputs that are put together from several pieces."""
        total = 0
        for map_ in self.reads[number]:
            first, stop = max(rows.need[0], 0), min(rows.need[1], self.shapes[map_].rows)
            pieces = [p for p in self.maps[map_] if p.first < stop and first < p.first + p.rows]
            if len(pieces) > 1:
                total += (stop - first) * self.shapes[map_].cols * self.shapes[map_].channels
        return total

    def let_go(self, number: int, first: int) -> None:
        """Let rows before `first` go as `Sweep` does."""
        pieces = self.maps[number]
        while pieces and pieces[0].first + pieces[0].rows <= first:
            del pieces[0]
        least = pieces[0].rows // 2 if pieces else 0
        if pieces and first - pieces[0].first > least:
            rest = pieces[0].first + pieces[0].rows - first
            pieces[0] = Piece(first, rest, self._new(number, rest))

    @property
    def cells(self) -> int:
        """Cells of all memory that is held."""
        pieces = (piece for map_ in (*self.maps, self.received) for piece in map_)
        return sum(self.sizes[storage] for storage in {piece.storage for piece in pieces})
