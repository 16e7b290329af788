"""A network over an image from top to bottom: which rows each layer computes, and which are kept.

Strips of the image's full width come in one after another. Each layer computes each of its rows
once, as soon as the rows that it looks at are there, and of each map just the rows are kept that
rows to come still look at. So the halo of a strip comes from the strips before, and nothing is
computed twice. (Alwani et al., "Fused-layer CNN accelerators", MICRO 2016.)
"""

from bisect import bisect_left
from dataclasses import dataclass

from tilenet.geometry.halo import map_grids
from tilenet.geometry.layers import Expand, GlobalPool, Join, Layer, Stash, walk

__all__ = ["LayerRows", "Rows", "Strip", "row_readers", "sweep"]

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


def sweep(layers: tuple[Layer, ...], rows: int, strip_rows: int) -> tuple[Strip, ...]:
    """The strips of an image, the last of which completes the output.

    Averages and statistics of the whole image are taken as known.

    Args:
        layers: Of a network that gives one cell per pixel (*same* padding).
        rows: Of the image, extended to a multiple of the alignment.
        strip_rows: Rows that come in at once.
    """
    sizes = walk(layers, rows, lambda layer, size, kept: layer.size(size, *kept))
    readers = _readers(layers)
    done = [0] * len(sizes)
    strips = []
    for first in range(0, rows, strip_rows):
        done[0] = min(first + strip_rows, rows)
        steps = []
        for number, (layer, reader) in enumerate(zip(layers, readers, strict=True), start=1):
            start = done[number]
            done[number] = _ready(layer, start, sizes[number], reader.waits, done, sizes)
            need = _needs(layer, start, done[number]) if reader.reads else (0, 0)
            steps.append(LayerRows((start, done[number]), need))
        held = tuple(
            (min(_still_read(layers, readers, one, done, sizes), stop), stop)
            for one, stop in enumerate(done)
        )
        strips.append(Strip((first, done[0]), tuple(steps), held))
    assert done == sizes, "a sweep ends with all rows of all maps"
    return tuple(strips)


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
    layers: tuple[Layer, ...],
    readers: tuple[_Reader, ...],
    number: int,
    done: list[int],
    sizes: list[int],
) -> int:
    """The first row of a map that a row to come looks at."""
    lows = [
        layer.needs(done[after], done[after])[0]
        for after, (layer, reader) in enumerate(zip(layers, readers, strict=True), start=1)
        if number in reader.reads and done[after] < sizes[after]
    ]
    return max(min(lows, default=done[number]), 0)
