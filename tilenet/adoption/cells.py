"""Tensors of a graph that compute each cell from the same cell of maps, in any dimensions.

A module may view a map as (B, groups, C / groups, H, W) or (B, H·W, C), work on it, and view it as
a map again. `Cells` records the dimensions that hold rows and columns, and the operators that
compute the tensor; once it is a map again, these operators become one cellwise layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import Tensor

from tilenet.adoption.values import Value
from tilenet.geometry.layers import Cellwise, HeldWeight, Step
from tilenet.model.cellwise import CONSTANT

Atom = int | str  # channels, or one of the letters
Dim = tuple[Atom, ...]  # atoms of a dimension, the last one runs fastest; empty: it has size 1
BATCH, ROWS, COLS = "B", "H", "W"
IMAGES = 2  # of the batch with which a graph is recorded
MOST_HELD = 2**11  # numbers that a layer holds


@dataclass(frozen=True)
class Weight:
    """A tensor of the module that is not a map.

    Attributes:
        name: Name in the module.
        shape: Shape in the module.
        trained: Whether it is a parameter that requires a gradient.
        constant: Whether the module's state does not hold it.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool
    constant: bool = False


@dataclass(frozen=True, eq=False)
class Cells:
    """A tensor: the atoms that its dimensions run over, and the operators that compute it.

    Attributes:
        dims: Atoms that each dimension runs over.
        size: Rows and columns of the maps that it is computed from; None: it is computed from
            numbers for each image only.
        whole: Whether these are whole maps.
        source: The map or the weight that it is; None: operators compute it.
        operator: The last of these operators, under its name in `model.cellwise`.
        arguments: Arguments of that operator as in a step, with tensors in place of numbers.
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
        return [atom if isinstance(atom, int) else sizes[atom] for atom in dim]

    @property
    def is_map(self) -> bool:
        """Whether it is a map (B, C, H, W), or an average (B, C, 1, 1)."""
        if len(self.dims) != 4 or self.dims[0] != (BATCH,) or not self.floats:
            return False
        spatial = ((ROWS,), (COLS,)) if self.size else ((), ())
        return self.dims[2:] == spatial and all(isinstance(atom, int) for atom in self.dims[1])

    def over_cells(self, place: int) -> bool:
        """Whether a dimension runs over images, rows or columns."""
        return any(isinstance(atom, str) for atom in self.dims[place])


def applied(operator: str, like: Cells, *arguments: Any, **other: Any) -> Cells:
    """The result of an operator: like one of its arguments, except for `other` fields."""
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

    Numbers that are the same for all channels are held once.
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
    constant = Cells(tuple(_channels(n) for n in few), operator=CONSTANT, arguments=arguments)
    if set(times) <= {1}:
        return constant
    dims = tuple(_channels(n * repeats) for n, repeats in zip(few, times, strict=True))
    return Cells(dims, operator="repeat.default", arguments=(constant, ("list", *times)))


def _channels(number: int) -> Dim:
    return () if number == 1 else (number,)


def regroup(cells: Cells, shape: Sequence[int]) -> tuple[Dim, ...] | None:
    """The dimensions of another shape with all numbers in their order; None: it parts cells.

    Channels may be split and put together; rows, columns and images only be put together, and
    parted again.
    """
    parts = [
        (a, size) for dim in cells.dims for a, size in zip(dim, cells.numbers(dim), strict=True)
    ]
    dims: list[Dim] = []
    for number in shape:
        dim: list[Atom] = []
        built = 1
        while built < number and parts:
            atom, size = parts.pop(0)
            if number % (built * size) == 0:
                dim.append(atom)
                built *= size
            elif isinstance(atom, int) and number % built == 0 and size % (number // built) == 0:
                dim.append(number // built)
                parts.insert(0, (size // (number // built), size // (number // built)))
                built = number
            else:
                return None
        if built != number:
            return None
        dims.append(merged(dim))
    return None if parts else tuple(dims)


def merged(dim: Sequence[Atom]) -> Dim:
    """Channels that follow on one another as one number."""
    atoms: list[Atom] = []
    for atom in dim:
        if isinstance(atom, int) and atoms and isinstance(atoms[-1], int):
            atoms[-1] *= atom
        elif atom != 1:
            atoms.append(atom)
    return tuple(atoms)


def sizes_of(dims: Sequence[Dim]) -> tuple[Any, ...]:
    """A shape as an argument of a step."""
    sizes: list[Any] = ["list"]
    for dim in dims:
        number = prod(atom for atom in dim if isinstance(atom, int))
        letters = "".join(atom for atom in dim if isinstance(atom, str))
        sizes.append(("size", number, letters) if letters else number)
    return tuple(sizes)


def map_of(cells: Cells) -> Value:
    """The map that a tensor is, computed by one layer."""
    if isinstance(cells.source, Value):
        return cells.source
    maps, weights, steps = _computed(cells)
    single = tuple(n for n, value in enumerate(maps) if value.whole and value.size == (1, 1))
    layer = Cellwise(
        0, prod(cells.numbers(cells.dims[1])), single=single, weights=_held(weights), steps=steps
    )
    whole = all(value.whole for value in maps)
    names = {f"w{n}": weight.name for n, weight in enumerate(weights)}
    return Value(layer.out_channels, cells.size or (1, 1), whole, layer, maps, names)


def kernel_of(cells: Cells) -> tuple[tuple[Weight, ...], dict[str, Any]] | None:
    """The weights of a computed kernel, and fields of its layer; None: maps are among them."""
    maps, weights, steps = _computed(cells)
    return None if maps else (weights, {"weights": _held(weights), "steps": steps})


def _held(weights: Sequence[Weight]) -> tuple[HeldWeight, ...]:
    return tuple((f"w{n}", w.shape, w.trained) for n, w in enumerate(weights))


def _computed(
    cells: Cells,
) -> tuple[tuple[Value, ...], tuple[Weight, ...], tuple[Step, ...]]:
    """Return the maps and weights that a tensor is computed from, and the steps that compute it."""
    maps: dict[int | str, Value] = {}
    weights: dict[int | str, Weight] = {}
    order: dict[int | str, Cells] = {}
    for tensor in _in_order(cells):
        match tensor.source:
            case Value() as value:
                maps[_key(tensor)] = value
            case Weight() as weight:
                weights[_key(tensor)] = weight
            case None:
                order[_key(tensor)] = tensor
    numbers = {key: number for number, key in enumerate((*maps, *weights, *order))}

    def argument(x: Any) -> Any:
        if isinstance(x, Cells):
            return "value", numbers[_key(x)]
        return tuple(argument(part) for part in x) if isinstance(x, tuple) else x

    steps: tuple[Step, ...] = tuple(
        (t.operator, *(argument(part) for part in t.arguments)) for t in order.values()
    )
    return tuple(maps.values()), tuple(weights.values()), steps


def maps_in(cells: Cells) -> list[Value]:
    """Return the maps that a tensor is computed from."""
    return [tensor.source for tensor in _in_order(cells) if isinstance(tensor.source, Value)]


def _key(cells: Cells) -> int | str:
    """Return the key of a tensor: the name of a weight, else the identity."""
    source = cells.source
    return source.name if isinstance(source, Weight) else id(cells if source is None else source)


def _in_order(cells: Cells) -> Iterator[Cells]:
    """Yield all tensors that a tensor is computed from, each after its own arguments."""
    visited: set[int] = set()
    waiting = [(cells, False)]
    while waiting:
        tensor, ready = waiting.pop()
        if ready:
            yield tensor
        elif id(tensor) not in visited:
            visited.add(id(tensor))
            waiting.append((tensor, True))
            waiting += [(part, False) for part in reversed(list(tensors_in(tensor.arguments)))]


def tensors_in(argument: Any) -> Iterator[Cells]:
    """The tensors among arguments of a step."""
    if isinstance(argument, Cells):
        yield argument
    elif isinstance(argument, tuple):
        for part in argument:
            yield from tensors_in(part)
