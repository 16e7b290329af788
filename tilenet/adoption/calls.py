"""An operator's call in a graph: its arguments, and the sentence that refuses it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

import torch

from tilenet.adoption.cells import Cells, Weight, cells_of, kernel_of, map_of
from tilenet.adoption.values import Value
from tilenet.errors import TilenetError
from tilenet.geometry.layers import Expand, GlobalPool, Layer

MOST_LETTERS = 160  # of values in a sentence
MOST_REASONS, MOST_PLACES = 3, 3
NO_MAP = "a tensor is made in forward of no map"
OTHER_NOISE = "random numbers are used for something else than drop path"
OPERATORS: dict[str, Callable[..., Any]] = {}  # by name, the function that turns calls into layers


def operator(*names: str) -> Callable[[Any], Any]:
    """Enter a function for operators of these names.

    It returns NotImplemented for calls that may act on cells alone.
    """

    def keep(function: Any) -> Any:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return keep


@dataclass(frozen=True)
class Moved:
    """A map with cells padded around it, or cut off, or every nth of its cells.

    Attributes:
        cells: The map.
        rows: Cells padded above and below, negative where they are cut off, and the n.
        cols: The same on the left and on the right.
        edge: Padding with zeros, or with copies of the map's cells (see `geometry.layers.Conv`).
        settled: The resulting map, once an operator has taken it.
    """

    cells: Cells
    rows: tuple[int, int, int] = (0, 0, 1)
    cols: tuple[int, int, int] = (0, 0, 1)
    edge: Literal["zeros", "replicate", "reflect"] = "zeros"
    settled: list[Cells] = field(default_factory=list, compare=False)

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns."""
        size = self.cells.size or (1, 1)
        rows, cols = (
            -(-(cells + before + behind) // step)
            for cells, (before, behind, step) in zip(size, (self.rows, self.cols), strict=True)
        )
        return rows, cols

    @property
    def pads_evenly(self) -> bool:
        """Whether a convolution's own padding can do it."""
        before, behind, step = self.rows
        return self.rows == self.cols and step == 1 and 0 <= before <= behind


@dataclass(frozen=True)
class Kernel:
    """A kernel of a convolution.

    Attributes:
        weights: Weights of the module by their names in the layer.
        computed: Fields of the layer for a kernel that is computed from these weights.
    """

    shape: tuple[int, ...]
    weights: dict[str, Weight]
    computed: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Noise:
    """Random numbers, one for each sample, on their way to drop path's masks.

    Attributes:
        stage: Memory without values; numbers from 0 to 1; these plus `keep`; masks of 0 and 1.
        keep: Probability that a sample is kept, once it is known.
        scaled: Whether masks are divided by it.
        thinned: The map that the masks have multiplied, which is divided by `keep` yet.
        source: An identity, to tell them from other random numbers.
    """

    stage: Literal["empty", "uniform", "shifted", "mask"]
    keep: float = 1.0
    scaled: bool = False
    thinned: Cells | None = None
    source: object = field(default_factory=object)


class Refusal(TilenetError):
    """An operator that cannot be a layer.

    Attributes:
        where: Path of the submodule, the operator, and the line of the user's source.
    """

    def __init__(self, why: str, where: str) -> None:
        self.why, self.where = why, where
        super().__init__(refusal_of([self]))


class Places(Refusal):
    """Places of a maximum pool's values, which only `max_unpool2d` can take.

    Attributes:
        pooled: The map that was pooled.
        width: Rows and columns of its windows; None: they do not lie side by side.
    """

    def __init__(self, refusal: Refusal, pooled: Value, width: int | None) -> None:
        super().__init__(refusal.why, refusal.where)
        self.pooled, self.width = pooled, width


def refusal_of(refusals: "Sequence[Refusal]") -> str:
    """One sentence on all of them, in their order."""
    places: dict[str, list[str]] = {}
    for refusal in refusals:
        places.setdefault(refusal.why, []).append(refusal.where)
    reasons = [
        f"{why} ({'; '.join([*where[:MOST_PLACES], *_left(len(where) - MOST_PLACES)])})"
        for why, where in list(places.items())[:MOST_REASONS]
    ]
    reasons += _left(sum(map(len, list(places.values())[MOST_REASONS:])))
    without = "these" if len(refusals) > 1 else "it"
    return (
        f"each layer's neighbourhood must be known, and {', '.join(reasons)}; use a network "
        f"without {without}, or halo_mode: windows (window_px in predict), which is approximate"
    )


def _left(number: int) -> list[str]:
    return [f"{number} more"] if number > 0 else []


@dataclass(frozen=True)
class Call:
    """An operator's call in the graph.

    Attributes:
        where: Path of the submodule that calls it.
        line: File and line of the user's source that calls it; empty: unknown.
        operator: The operator's name, without the `_` of operators that write over their argument.
        target: The full name with the overload, such as `mul.Tensor`.
        shape: Shape of the result; a list of shapes where there are several results.
        floats: Whether the result holds numbers of the map's own precision.
        batch_norm: Treatment of batch norm's statistics: `frozen` or `step`.
        maps: All maps so far, the latest last.
    """

    where: str
    line: str
    operator: str
    target: str
    shape: tuple[int, ...] | list[tuple[int, ...]]
    floats: bool
    batch_norm: str
    maps: list[Value]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the one result."""
        assert isinstance(self.shape, tuple)
        return self.shape

    def refused(self, why: str, *, values: str = "") -> "Refusal":
        """The error that this call cannot be a layer."""
        place = self.where or "the module itself"
        line = f", {self.line}" if self.line else ""
        return Refusal(why, f"{place}: {self.operator}{values[:MOST_LETTERS]}{line}")

    def cells(self, x: Any) -> Cells:
        """An argument that is a map in any dimensions."""
        if not isinstance(x, Cells) or isinstance(x.source, Weight):
            raise self.refused("the operator is applied to a tensor that is not a map")
        return x

    def map_of(self, x: Any) -> Value:
        """An argument that is a map (B, C, H, W)."""
        cells = self.cells(x)
        if not cells.is_map:
            raise self.refused("the operator is applied to a tensor that is not a map (B, C, H, W)")
        return self.entered(map_of(cells))

    def entered(self, value: Value) -> Value:
        if not any(value is known for known in self.maps):
            self.maps.append(value)
        return value

    def weight(self, x: Any) -> Weight:
        """An argument that is a weight as the module holds it."""
        x = x.source if isinstance(x, Cells) else x
        if not isinstance(x, Weight):
            raise self.refused("a weight is computed in forward")
        if x.constant:
            raise self.refused(
                "a weight is made in forward, or is a buffer that is not persistent or not of "
                "floating-point numbers"
            )
        return x

    def kernel(self, x: Any) -> Kernel:
        """Return an argument as a kernel: a weight, or computed from weights and numbers."""
        if not isinstance(x, Cells) or isinstance(x.source, Weight):
            weight = self.weight(x)
            return Kernel(weight.shape, {"weight": weight})
        computed = kernel_of(x)
        if computed is None or any(x.over_cells(place) for place in range(len(x.dims))):
            raise self.refused("a kernel is computed of maps")
        weights, layer = computed
        return Kernel(x.shape, {f"w{n}": weight for n, weight in enumerate(weights)}, layer)

    def pair(self, numbers: Any) -> tuple[int, int]:
        """An argument of a number for rows and one for columns, or of one for both."""
        numbers = list(numbers) if isinstance(numbers, list | tuple) else [numbers]
        return int(numbers[0]), int(numbers[-1])

    def square(self, numbers: Any) -> int:
        """An argument of one number for rows and columns."""
        rows, cols = self.pair(numbers)
        if rows != cols:
            raise self.refused(
                "rows and columns are treated differently", values=f" {[rows, cols]}"
            )
        return rows

    def layer(self, layer: Layer, *inputs: Value, weights: dict[str, Any] | None = None) -> Value:
        """The map that a layer makes, of the call's shape."""
        names = {own: self.weight(w).name for own, w in (weights or {}).items() if w is not None}
        whole = isinstance(layer, GlobalPool) or (
            all(value.whole for value in inputs) and not isinstance(layer, Expand)
        )
        size = self.sizes[2], self.sizes[3]
        return Value(layer.out_channels, size, whole, layer, inputs, names)

    def add_layer(
        self, layer: Layer, *inputs: Value, weights: dict[str, Any] | None = None
    ) -> Cells:
        """The same as `Cells`."""
        return cells_of(self.entered(self.layer(layer, *inputs, weights=weights)))


@dataclass(frozen=True)
class Arguments:
    """Arguments of a call by their names in the operator's schema.

    Attributes:
        by_name: Values in the schema's order; tensors are `Cells`, lists tuples that begin with
            `list`.
        defaults: Names of the arguments that hold the schema's default.
        keyword_only: Names of the arguments that are passed by name only.
    """

    by_name: dict[str, Any]
    defaults: frozenset[str]
    keyword_only: frozenset[str]

    def value(self, name: str) -> Any:
        """An argument; None: the operator has no argument of that name."""
        value = self.by_name.get(name)
        return list(value[1:]) if isinstance(value, tuple) else value

    def places(self, *names: str) -> list[int]:
        """An argument that is one dimension or several."""
        value: Any = next((self.value(name) for name in names if self.value(name) is not None), [])
        return list(value) if isinstance(value, list) else [int(value)]

    def as_step(self, call: Call) -> tuple[Any, ...]:
        """The arguments as a step has them, without defaults at the end."""
        positional = [
            (name, value) for name, value in self.by_name.items() if name not in self.keyword_only
        ]
        while positional and positional[-1][0] in self.defaults:
            positional.pop()
        for name in self.keyword_only - self.defaults:
            if name in WITHOUT_EFFECT:
                continue
            positional.append((name, ("named", name, self.by_name[name])))
        arguments = tuple(value for _, value in positional)
        if not _is_plain(arguments):
            raise call.refused("an argument is not the usual one", values=f" {arguments}")
        return arguments

    def run(self, call: Call, x: torch.Tensor) -> Any:
        """The operator's result for another first tensor, where all other arguments are numbers."""
        packet, _, overload = call.target.partition(".")
        function = getattr(getattr(torch.ops.aten, packet), overload)
        arguments = self.as_step(call)[1:]
        return function(x, *(list(o[1:]) if isinstance(o, tuple) else o for o in arguments))


def _is_plain(argument: Any) -> bool:
    """Whether a file can hold an argument."""
    if isinstance(argument, tuple):
        return all(_is_plain(part) for part in argument)
    if isinstance(argument, int | float):
        return isfinite(argument)
    return argument is None or isinstance(argument, str | Cells)


# Arguments that choose where and how numbers are held or computed, not which.
WITHOUT_EFFECT = frozenset({
    "cudnn_enable", "cudnn_enabled", "device", "generator", "layout", "memory_format",
    "non_blocking", "copy", "pin_memory",
})  # fmt: skip
