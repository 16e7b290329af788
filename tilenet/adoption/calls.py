"""What an operator of a graph is given: maps, weights, numbers on their way; and its call."""

from dataclasses import dataclass
from typing import Any

from tilenet.adoption.values import Value
from tilenet.errors import TilenetError
from tilenet.geometry.layers import Expand, GlobalPool, Layer

__all__ = ["Call", "Noise", "Seen", "Stack", "Weight"]


@dataclass(frozen=True)
class Weight:
    """A tensor of the module that is no map.

    Attributes:
        name: Its name in the module.
        shape: As it is used.
        trained: Whether it is a parameter.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool


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
        keep: Probability that a sample is kept; None: not known yet.
        scaled: Whether masks are divided by it.
    """

    keep: float | None = None
    scaled: bool = False


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
            f"{values}); use a network without it"
        )

    def map_of(self, found: Any, *, last: bool = False, padded: bool = False) -> Value:
        """An argument that is a map with its channels where the operator takes them."""
        if not isinstance(found, Seen):
            raise self.refused("the operator is applied to what is no map")
        if found.last != last:
            raise self.refused("channels stand where the operator does not take them")
        if found.zeros != (0, 0) and not padded:
            raise self.refused("zeros are padded for another operator than a convolution")
        return found.value

    def square(self, found: Any) -> int:
        """An argument of one number for rows and columns."""
        numbers = list(found) if isinstance(found, list | tuple) else [found]
        if len(set(numbers)) != 1:
            raise self.refused("rows and columns are treated differently", values=f" {numbers}")
        return int(numbers[0])

    def made(
        self, layer: Layer, *inputs: Value, weights: dict[str, Weight | None] | None = None
    ) -> Value:
        """The map that a layer makes, of the call's shape."""
        named = {own: one.name for own, one in (weights or {}).items() if one is not None}
        whole = isinstance(layer, GlobalPool) or (
            all(one.whole for one in inputs) and not isinstance(layer, Expand)
        )
        size = self.shape[2], self.shape[3]
        return Value(layer.out_channels, size, whole, layer, inputs, named)
