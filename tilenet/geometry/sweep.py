"""A network over an image from top to bottom: which rows each layer computes, and which are kept.

Strips of the image's full width come in one after another. Each layer computes each of its rows
once, as soon as the rows that it looks at are there, and of each map just the rows are kept that
rows to come still look at. So the halo of a strip comes from the strips before, and nothing is
computed twice. (Alwani et al., "Fused-layer CNN accelerators", MICRO 2016.)
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tilenet.geometry.layers import Expand, GlobalPool, Join, Layer, Stash, walk
from tilenet.geometry.maps import map_grids

MOST_BORDER = 1 << 16  # cells beyond the end of a map that a layer looks at

Rows = tuple[int, int]  # the first, and the one behind the last


@dataclass(frozen=True)
class LayerRows:
    """Rows that a layer computes and reads in a strip.

    Attributes:
        out: Rows that it computes of its map.
        need: Rows that these look at in the maps that it reads; they may lie outside of the map,
            where the layer sees its border.
    """

    out: Rows
    need: Rows


@dataclass(frozen=True)
class Strip:
    """The work of each layer once a strip has come in.

    Attributes:
        image: Rows of the image; none when all have come, and layers still look beyond its end.
        layers: Rows of each layer, in order.
        held: Rows of the image and of each layer's map that are kept for strips to come.
    """

    image: Rows
    layers: tuple[LayerRows, ...]
    held: tuple[Rows, ...]

    @property
    def output(self) -> Rows:
        """Rows of the network's output that the strip completes."""
        return self.layers[-1].out


@dataclass(frozen=True)
class Sweeps:
    """The sweeps of an image in training, one for each average of it and one for the output.

    Attributes:
        edges: Rows between strips, as for `sweep`.
        kept_maps: Numbers of the maps that the sweep to a layer that averages keeps for later
            sweeps, by the layer; empty: all sweeps begin at the image.
    """

    edges: Sequence[int]
    kept_maps: Mapping[int, Collection[int]] = field(default_factory=dict)


def row_readers(layers: tuple[Layer, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the maps that each layer reads rows of, the image being number 0."""
    return tuple(
        () if isinstance(layer, Expand) else maps
        for layer, maps in zip(layers, _awaited(layers), strict=True)
    )


def last_readers(layers: tuple[Layer, ...], own: range | None = None) -> list[list[int]]:
    """Return the maps that each layer is the last to read.

    Args:
        own: The layers that count, consecutive ones; None: all.
    """
    own, readers = own or range(len(layers)), row_readers(layers)
    last = {map_: layer for layer in own for map_ in readers[layer]}
    read_last: list[list[int]] = [[] for _ in layers]
    for map_ in range(len(layers)):
        # Without a reader: a map that is averaged, or that another replaces.
        read_last[last.get(map_, min(map_, own[-1]))].append(map_)
    return read_last


def maps_before(
    layers: tuple[Layer, ...], maps: Iterable[int], at_hand: Collection[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """The maps to compute for `maps`, these included, and the maps at hand that are read for them.

    Averages and statistics are known, as for `sweep`.

    Args:
        maps: Numbers of maps, the image being 0.
        at_hand: Numbers of the maps at hand.

    Returns:
        Numbers of the maps to compute, and of the maps of `at_hand` and the image that are read.
    """
    readers, left = row_readers(layers), list(maps)
    computed, read = set[int](), set[int]()
    while left:
        map_ = left.pop()
        if map_ == 0 or map_ in at_hand:
            read.add(map_)
        elif map_ not in computed:
            computed.add(map_)
            left += readers[map_ - 1]
    return frozenset(computed), frozenset(read)


def strip_edges(rows: int, strip_rows: int) -> tuple[int, ...]:
    """Return the edges of strips of `strip_rows` rows; the last strip may have fewer."""
    return (*range(0, rows, strip_rows), rows)


def sweep(
    layers: tuple[Layer, ...], edges: Sequence[int], own: range | None = None
) -> Iterator[Strip]:
    """Yield the strips of an image; the last one completes the output.

    Behind the last rows of the image come strips without any, so that layers never compute more
    rows at once than elsewhere.

    Averages and statistics of the whole image are taken as known, and layers that only they look at
    are not computed.

    Args:
        layers: A network with *same* padding, or its first layers.
        edges: Rows of the image between strips, 0 and the image's rows included, which are a
            multiple of the alignment.
        own: The layers for which rows are kept; None: all.
    """
    own = own or range(len(layers))
    rows, height = edges[-1], edges[-1] - edges[-2]
    sizes = walk(layers, rows, lambda layer, size, stashed: layer.size(size, *stashed))
    awaited, readers = _awaited(layers), row_readers(layers)
    read_by: list[list[int]] = [[] for _ in sizes]
    needed = _needed_maps(awaited)
    sizes = [size if number in needed else 0 for number, size in enumerate(sizes)]
    for number, maps in enumerate(readers):
        for map_ in maps if number + 1 in needed and number in own else ():
            read_by[map_].append(number)
    come = [0] * len(sizes)  # rows of each map, those beyond its end too
    more = [0] * len(sizes)  # that came with the strip before
    ends = iter(edges[1:])
    while come[-1] < sizes[-1]:
        image = min(come[0], rows), next(ends, rows)
        come[0] = come[0] + height if image[0] == rows else image[1]
        steps = []
        for number, layer in enumerate(layers, start=1):
            before, size = come[number], sizes[number]
            come[number] = _ready(layer, before, size, awaited[number - 1], come, more[number])
            more[number] = come[number] - before
            out = min(before, size), min(come[number], size)
            steps.append(LayerRows(out, _needs(layer, *out) if readers[number - 1] else (0, 0)))
        done = [min(stop, size) for stop, size in zip(come, sizes, strict=True)]
        held = tuple((stop, stop) for stop in done)
        if come[-1] < sizes[-1]:
            held = tuple(
                (min(_still_read(layers, read_by[map_], done, sizes, stop), stop), stop)
                for map_, stop in enumerate(done)
            )
        yield Strip(image, tuple(steps), held)


def _needed_maps(awaited: tuple[tuple[int, ...], ...]) -> set[int]:
    """The maps that the output looks at, or waits for."""
    needed = {len(awaited)}
    for number, maps in reversed(list(enumerate(awaited, start=1))):
        if number in needed:
            needed.update(maps)
    return needed


@lru_cache(maxsize=64)
def _awaited(layers: tuple[Layer, ...]) -> tuple[tuple[int, ...], ...]:
    """The maps that each layer waits for rows of; an `Expand` reads none of them."""
    grids, stashed = map_grids(layers), dict[str, int]()
    awaited = []
    for number, layer in enumerate(layers):
        joined = tuple(stashed.pop(name) for name in layer.names)
        if isinstance(layer, Stash):
            stashed[layer.name] = number
        if isinstance(layer, Expand):
            awaited.append(joined)
            continue
        sources = joined if isinstance(layer, Join) and layer.how == "take" else (number, *joined)
        sources = () if isinstance(layer, GlobalPool) else sources
        awaited.append(tuple(map_ for map_ in sources if not grids[map_].whole))
    return tuple(awaited)


def _needs(layer: Layer, first: int, stop: int) -> Rows:
    if stop <= first:
        return first, first
    low, high = layer.needs(first, stop - 1)
    return low, max(high + 1, low)


def _ready(
    layer: Layer, first: int, size: int, waits: tuple[int, ...], come: list[int], more: int
) -> int:
    """The first row of a layer that looks at rows which have not come yet.

    Args:
        first: A row that it is not before.
        more: Rows that it most likely lies behind `first`.
    """
    # Rows beyond its end too, where layers see their border: as many as any layer looks at.
    stop = max(first, 2 * size + MOST_BORDER) + 1
    if not waits:
        return stop
    come_rows = min([come[map_] for map_ in waits])

    def must_wait(row: int) -> bool:
        return (row if isinstance(layer, Expand) else layer.needs(row, row)[1]) >= come_rows

    likely = first + more
    if likely < stop and must_wait(likely) and (likely == first or not must_wait(likely - 1)):
        return likely
    return bisect_left(range(stop), True, lo=first, key=must_wait)


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
