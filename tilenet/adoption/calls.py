"""What an operator of a graph is given: maps, weights, numbers on their way; and its call."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tilenet.adoption.values import Value
from tilenet.errors import TilenetError
from tilenet.geometry.layers import Expand, GlobalPool, Layer

__all__ = ["BATCH", "OPERATORS", "Call", "Noise", "Seen", "Stack", "Weight", "operator"]

BATCH = 2  # images of the batch with which a graph is recorded
MOST_LETTERS = 160  # of values in a sentence
OPERATORS: dict[str, Callable[..., Any]] = {}  # what makes layers of an operator's calls


def operator(*names: str) -> Callable[[Any], Any]:
    """Enter a function for operators of these names."""

    def keep(function: Any) -> Any:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return keep


@dataclass(frozen=True)
class Weight:
    """A tensor of the module that is no map.

    Attributes:
        name: Its name in the module.
        shape: Shape in which it is used.
        trained: Whether it is a parameter that requires a gradient.
        number: Value of a constant of one number.
        constant: Whether the module's state does not hold it.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool
    number: float | None = None
    constant: bool = False


@dataclass(frozen=True)
class Seen:
    """A map as the graph holds it.

    Attributes:
        value: The map.
        last: Whether the channels come last, (B, H, W, C).
        zeros: Zeros that were padded on the left and above, and on the right and below.
    """

    value: Value
    last: bool = False
    zeros: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Stack:
    """Maps in a dimension of their own, which only a sum over it may follow."""

    maps: tuple[Seen, ...]


@dataclass(frozen=True)
class Noise:
    """Random numbers, one for each sample, on their way to drop path's masks.

    Attributes:
        stage: Memory without values; numbers from 0 to 1; these plus `keep`; masks of 0 and 1.
        keep: Probability that a sample is kept, once it is known.
        scaled: Whether masks are divided by it.
        source: What tells them from other random numbers.
    """

    stage: Literal["empty", "uniform", "shifted", "mask"]
    keep: float = 1.0
    scaled: bool = False
    source: object = field(default_factory=object)


@dataclass(frozen=True)
class Call:
    """An operator's call in the graph.

    Attributes:
        where: Path of the submodule that calls it.
        operator: The operator's name.
        shape: Shape of the result.
        batch_norm: What is made of batch norm's statistics: `frozen` or `step`.
        maps: All maps so far, the latest last.
    """

    where: str
    operator: str
    shape: tuple[int, ...]
    batch_norm: str
    maps: list[Value]

    def refused(self, why: str, *, values: str = "") -> TilenetError:
        """The sentence for what cannot be a layer."""
        place = self.where or "the module itself"
        return TilenetError(
            f"each layer's neighbourhood must be known, and {why} ({place}: {self.operator}"
            f"{values[:MOST_LETTERS]}); use a network without it"
        )

    def seen(self, x: Any) -> Seen:
        """An argument that is a map, wherever its channels stand."""
        if not isinstance(x, Seen):
            raise self.refused("the operator is applied to what is no map")
        if x.zeros != (0, 0):
            raise self.refused("zeros are padded for another operator than a convolution")
        return x

    def map_of(self, x: Any, *, last: bool = False) -> Value:
        """An argument that is a map with its channels where the operator takes them."""
        seen = self.seen(x)
        if seen.last != last:
            raise self.refused("channels stand where the operator does not take them")
        return seen.value

    def weight(self, x: Any) -> Weight:
        """An argument that is a weight as the module holds it."""
        if not isinstance(x, Weight):
            raise self.refused("a weight is computed in forward")
        if x.constant:
            raise self.refused("a weight is made in forward, or is a buffer that is not persistent")
        return x

    def square(self, numbers: Any) -> int:
        """An argument of one number for rows and columns."""
        numbers = list(numbers) if isinstance(numbers, list | tuple) else [numbers]
        if len(set(numbers)) != 1:
            raise self.refused("rows and columns are treated differently", values=f" {numbers}")
        return int(numbers[0])

    def made(
        self, layer: Layer, *inputs: Value, weights: dict[str, Weight | None] | None = None
    ) -> Value:
        """The map that a layer makes, of the call's shape."""
        named = {own: self.weight(w).name for own, w in (weights or {}).items() if w is not None}
        whole = isinstance(layer, GlobalPool) or (
            all(one.whole for one in inputs) and not isinstance(layer, Expand)
        )
        size = self.shape[2], self.shape[3]
        return Value(layer.out_channels, size, whole, layer, inputs, named)
