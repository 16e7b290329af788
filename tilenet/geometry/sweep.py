"""A network over an image from top to bottom: which rows each layer computes, and which are kept.

Strips of the image's full width come in one after another. Each layer computes each of its rows
once, as soon as the rows that it looks at are there, and of each map just the rows are kept that
rows to come still look at. So the halo of a strip comes from the strips before, and nothing is
computed twice. (Alwani et al., "Fused-layer CNN accelerators", MICRO 2016.)
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tilenet.geometry.halo import map_grids
from tilenet.geometry.layers import Expand, GlobalPool, Join, Layer, Stash, walk

__all__ = ["LayerRows", "Rows", "Strip", "row_readers", "strip_edges", "sweep"]

Rows = tuple[int, int]  # the first, and the one behind the last


@dataclass(frozen=True)
class LayerRows:
    """What a layer does in a strip.

    Attributes:
        out: Rows that it computes of its map.
        need: Rows that these look at in the maps that it reads; they may lie outside of the map,
            where the layer sees its border.
    """

    out: Rows
    need: Rows


@dataclass(frozen=True)
class Strip:
    """What happens when a strip has come in.

    Attributes:
        image: Rows of the image.
        layers: For each layer in order.
        held: For the image and each layer's map the rows that are kept for strips to come.
    """

    image: Rows
    layers: tuple[LayerRows, ...]
    held: tuple[Rows, ...]

    @property
    def output(self) -> Rows:
        """Rows of the network's output that it completes."""
        return self.layers[-1].out


@dataclass(frozen=True)
class _Reader:
    """Whose rows a layer waits for, and whose it reads; maps are counted from the image, 0."""

    waits: tuple[int, ...]
    reads: tuple[int, ...]


def row_readers(layers: tuple[Layer, ...]) -> tuple[tuple[int, ...], ...]:
    """For each layer the maps that it reads rows of, the image being number 0."""
    return tuple(one.reads for one in _readers(layers))


def strip_edges(rows: int, strip_rows: int) -> tuple[int, ...]:
    """Edges of strips of so many rows, the last of which may have fewer."""
    return (*range(0, rows, strip_rows), rows)


def sweep(layers: tuple[Layer, ...], edges: Sequence[int]) -> Iterator[Strip]:
    """The strips of an image, the last of which completes the output.

    Averages and statistics of the whole image are taken as known.

    Args:
        layers: A network with *same* padding, or its first layers.
        edges: Rows of the image between strips, 0 and the image's rows included, which are a
            multiple of the alignment.
    """
    rows = edges[-1]
    sizes = walk(layers, rows, lambda layer, size, kept: layer.size(size, *kept))
    readers = _readers(layers)
    read_by: list[list[int]] = [[] for _ in sizes]
    for number, reader in enumerate(readers):
        for one in reader.reads:
            read_by[one].append(number)
    done = [0] * len(sizes)
    for first, stop in pairwise(edges):
        done[0] = stop
        steps = []
        for number, (layer, reader) in enumerate(zip(layers, readers, strict=True), start=1):
            start = done[number]
            done[number] = _ready(layer, start, sizes[number], reader.waits, done, sizes)
            need = _needs(layer, start, done[number]) if reader.reads else (0, 0)
            steps.append(LayerRows((start, done[number]), need))
        held = tuple(
            (min(_still_read(layers, read_by[one], done, sizes, stop), stop), stop)
            for one, stop in enumerate(done)
        )
        yield Strip((first, done[0]), tuple(steps), held)
    assert done == sizes, "a sweep ends with all rows of all maps"


def _readers(layers: tuple[Layer, ...]) -> tuple[_Reader, ...]:
    grids, kept = map_grids(layers), dict[str, int]()
    found = []
    for number, layer in enumerate(layers):
        named = tuple(kept.pop(name) for name in layer.names)
        if isinstance(layer, Stash):
            kept[layer.name] = number
        if isinstance(layer, Expand):
            found.append(_Reader(named, ()))
            continue
        taken = named if isinstance(layer, Join) and layer.how == "take" else (number, *named)
        rows = tuple(
            one for one in taken if not (grids[one].whole or isinstance(layer, GlobalPool))
        )
        found.append(_Reader(rows, rows))
    return tuple(found)


def _needs(layer: Layer, first: int, stop: int) -> Rows:
    if stop <= first:
        return first, first
    low, high = layer.needs(first, stop - 1)
    return low, max(high + 1, low)


def _ready(
    layer: Layer, first: int, size: int, waits: tuple[int, ...], done: list[int], sizes: list[int]
) -> int:
    """The first row of a layer that looks at rows which have not come yet."""
    waiting = [one for one in waits if done[one] < sizes[one]]

    def must_wait(row: int) -> bool:
        last = row if isinstance(layer, Expand) else layer.needs(row, row)[1]
        return any(last >= done[one] for one in waiting)

    return bisect_left(range(size), True, lo=first, key=must_wait) if waiting else size


def _still_read(
    layers: tuple[Layer, ...], read_by: list[int], done: list[int], sizes: list[int], stop: int
) -> int:
    """The first row that a row to come looks at, of a map that has come to `stop`."""
    lows = [
        layers[number].needs(done[number + 1], done[number + 1])[0]
        for number in read_by
        if done[number + 1] < sizes[number + 1]
    ]
    return max(min(lows, default=stop), 0)
