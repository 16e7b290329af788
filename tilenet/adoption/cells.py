"""Tensors of a graph whose cells are made of the same cells of maps, whatever their dimensions.

A module may view a map as (B, groups, C / groups, H, W) or (B, H·W, C), work on it, and view it as
a map again. `Cells` says where rows and columns went, and what computes it; once it is a map again,
all that lies between becomes one cellwise layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import Tensor

from tilenet.adoption.values import Value
from tilenet.geometry.layers import Cellwise, HeldWeight, Step
from tilenet.model.cellwise import CONSTANT

__all__ = [
    "BATCH", "COLS", "IMAGES", "ROWS", "Atom", "Cells", "Dim", "Weight", "applied", "cells_of",
    "constant_of", "kernel_of", "map_of", "maps_in", "merged", "numbers_of", "regroup", "sizes_of",
    "tensors_in",
]  # fmt: skip

Atom = int | str  # channels, or one of the letters
Dim = tuple[Atom, ...]  # what a dimension runs over, the last one fastest; none: it has size 1
BATCH, ROWS, COLS = "B", "H", "W"
IMAGES = 2  # of the batch with which a graph is recorded
MOST_HELD = 2**11  # numbers that a layer holds


@dataclass(frozen=True)
class Weight:
    """A tensor of the module that is no map.

    Attributes:
        name: Its name in the module.
        shape: Its shape.
        trained: Whether it is a parameter that requires a gradient.
        constant: Whether the module's state does not hold it.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool
    constant: bool = False


@dataclass(frozen=True, eq=False)
class Cells:
    """A tensor, by what its dimensions run over and by what computes it.

    Attributes:
        dims: What each dimension runs over.
        size: Rows and columns of the maps that it is made of; None: of numbers for each image only.
        whole: Whether these are whole maps.
        source: The map or the weight that it is; None: operators compute it.
        operator: The last of them, as `model.cellwise` knows it.
        arguments: Its arguments as a step has them, with tensors in place of their numbers.
        floats: Whether it holds numbers of the map's own precision.
    """

    dims: tuple[Dim, ...]
    size: tuple[int, int] | None = None
    whole: bool = False
    source: Value | Weight | None = None
    operator: str = ""
    arguments: tuple[Any, ...] = ()
    floats: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the recorded graph."""
        return tuple(prod(self.numbers(dim)) for dim in self.dims)

    def numbers(self, dim: Dim) -> list[int]:
        """Sizes of the parts of a dimension."""
        rows, cols = self.size or (1, 1)
        sizes = {BATCH: IMAGES, ROWS: rows, COLS: cols}
        return [one if isinstance(one, int) else sizes[one] for one in dim]

    @property
    def is_map(self) -> bool:
        """Whether it is a map (B, C, H, W), or an average (B, C, 1, 1)."""
        if len(self.dims) != 4 or self.dims[0] != (BATCH,) or not self.floats:
            return False
        spatial = ((ROWS,), (COLS,)) if self.size else ((), ())
        return self.dims[2:] == spatial and all(isinstance(one, int) for one in self.dims[1])

    def over_cells(self, place: int) -> bool:
        """Whether a dimension runs over images, rows or columns."""
        return any(isinstance(one, str) for one in self.dims[place])


def applied(operator: str, like: Cells, *arguments: Any, **other: Any) -> Cells:
    """What an operator makes of arguments: as one of them is, but for what else is said."""
    return replace(like, source=None, operator=operator, arguments=arguments, **other)


def cells_of(source: Value | Weight) -> Cells:
    """A map or a weight, by its dimensions."""
    if isinstance(source, Weight):
        return Cells(tuple(_channels(n) for n in source.shape), source=source)
    single = source.whole and source.size == (1, 1)
    spatial: tuple[Dim, Dim] = ((), ()) if single else ((ROWS,), (COLS,))
    dims = ((BATCH,), _channels(source.channels), *spatial)
    return Cells(dims, None if single else source.size, source.whole, source)


def constant_of(name: str, tensor: Tensor) -> Cells | float:
    """A tensor that the module's state does not hold, as numbers that a layer holds.

    What is the same for all channels is held once.
    """
    if tensor.numel() == 1:
        return float(tensor)
    shape, times = tuple(tensor.shape), list[int]()
    for place, number in enumerate(shape):
        first = tensor.narrow(place, 0, 1)
        alike = number > 1 and bool((tensor == first).all())
        times.append(number if alike else 1)
        tensor = first if alike else tensor
    sound = tensor.is_floating_point() and bool(tensor.isfinite().all())
    if not sound or tensor.numel() > MOST_HELD:
        return cells_of(Weight(name, shape, trained=False, constant=True))
    return numbers_of(tensor, times)


def numbers_of(tensor: Tensor, times: Sequence[int]) -> Cells:
    """Numbers that a layer holds, which are repeated along dimensions."""
    few = tuple(tensor.shape)
    arguments = ("list", *tensor.flatten().tolist()), ("list", *few)
    held = Cells(tuple(_channels(n) for n in few), operator=CONSTANT, arguments=arguments)
    if set(times) <= {1}:
        return held
    dims = tuple(_channels(n * many) for n, many in zip(few, times, strict=True))
    return Cells(dims, operator="repeat.default", arguments=(held, ("list", *times)))


def _channels(number: int) -> Dim:
    return () if number == 1 else (number,)


def regroup(cells: Cells, shape: Sequence[int]) -> tuple[Dim, ...] | None:
    """What dimensions of another shape run over, with all numbers in their order; None: cells part.

    Channels may be split and put together; rows, columns and images only be put together, and
    parted again.
    """
    parts = [
        (one, size) for dim in cells.dims for one, size in zip(dim, cells.numbers(dim), strict=True)
    ]
    dims: list[Dim] = []
    for wanted in shape:
        dim: list[Atom] = []
        there = 1
        while there < wanted and parts:
            one, size = parts.pop(0)
            if wanted % (there * size) == 0:
                dim.append(one)
                there *= size
            elif isinstance(one, int) and wanted % there == 0 and size % (wanted // there) == 0:
                dim.append(wanted // there)
                parts.insert(0, (size // (wanted // there), size // (wanted // there)))
                there = wanted
            else:
                return None
        if there != wanted:
            return None
        dims.append(merged(dim))
    return None if parts else tuple(dims)


def merged(dim: Sequence[Atom]) -> Dim:
    """Channels that follow on one another as one number."""
    found: list[Atom] = []
    for one in dim:
        if isinstance(one, int) and found and isinstance(found[-1], int):
            found[-1] *= one
        elif one != 1:
            found.append(one)
    return tuple(found)


def sizes_of(dims: Sequence[Dim]) -> tuple[Any, ...]:
    """A shape as an argument of a step."""
    found: list[Any] = ["list"]
    for dim in dims:
        number = prod(one for one in dim if isinstance(one, int))
        letters = "".join(one for one in dim if isinstance(one, str))
        found.append(("size", number, letters) if letters else number)
    return tuple(found)


def map_of(cells: Cells) -> Value:
    """The map that a tensor is, computed by one layer."""
    if isinstance(cells.source, Value):
        return cells.source
    maps, weights, steps = _computed(cells)
    single = tuple(n for n, one in enumerate(maps) if one.whole and one.size == (1, 1))
    layer = Cellwise(
        0, prod(cells.numbers(cells.dims[1])), single=single, weights=_held(weights), steps=steps
    )
    whole = all(one.whole for one in maps)
    named = {f"w{n}": weight.name for n, weight in enumerate(weights)}
    return Value(layer.out_channels, cells.size or (1, 1), whole, layer, maps, named)


def kernel_of(cells: Cells) -> tuple[tuple[Weight, ...], dict[str, Any]] | None:
    """The weights of which a kernel is computed, and what its layer says of that; None: of maps."""
    maps, weights, steps = _computed(cells)
    return None if maps else (weights, {"weights": _held(weights), "steps": steps})


def _held(weights: Sequence[Weight]) -> tuple[HeldWeight, ...]:
    return tuple((f"w{n}", w.shape, w.trained) for n, w in enumerate(weights))


def _computed(
    cells: Cells,
) -> tuple[tuple[Value, ...], tuple[Weight, ...], tuple[Step, ...]]:
    """What a tensor is computed of, and how."""
    maps: dict[int | str, Value] = {}
    weights: dict[int | str, Weight] = {}
    order: dict[int | str, Cells] = {}
    for one in _in_order(cells):
        match one.source:
            case Value() as value:
                maps[_key(one)] = value
            case Weight() as weight:
                weights[_key(one)] = weight
            case None:
                order[_key(one)] = one
    numbers = {key: number for number, key in enumerate((*maps, *weights, *order))}

    def argument(one: Any) -> Any:
        if isinstance(one, Cells):
            return "value", numbers[_key(one)]
        return tuple(argument(part) for part in one) if isinstance(one, tuple) else one

    steps: tuple[Step, ...] = tuple(
        (one.operator, *(argument(part) for part in one.arguments)) for one in order.values()
    )
    return tuple(maps.values()), tuple(weights.values()), steps


def maps_in(cells: Cells) -> list[Value]:
    """The maps that a tensor is made of."""
    return [one.source for one in _in_order(cells) if isinstance(one.source, Value)]


def _key(cells: Cells) -> int | str:
    """What tells tensors apart: a weight its name."""
    source = cells.source
    return source.name if isinstance(source, Weight) else id(cells if source is None else source)


def _in_order(cells: Cells) -> Iterator[Cells]:
    """All that a tensor is computed of, each behind what it is computed of itself."""
    seen: set[int] = set()
    waiting = [(cells, False)]
    while waiting:
        one, ready = waiting.pop()
        if ready:
            yield one
        elif id(one) not in seen:
            seen.add(id(one))
            waiting.append((one, True))
            waiting += [(part, False) for part in reversed(list(tensors_in(one.arguments)))]


def tensors_in(argument: Any) -> Iterator[Cells]:
    """The tensors among arguments of a step."""
    if isinstance(argument, Cells):
        yield argument
    elif isinstance(argument, tuple):
        for part in argument:
            yield from tensors_in(part)
