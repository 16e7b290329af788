"""Bytes of a layer, which `layer.py` measures and which peaks are put together from."""

from collections.abc import Sequence
from dataclasses import dataclass

from tilenet.geometry.layers import Layer


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer for one micro-batch.

    Attributes:
        parameters: Trained values.
        buffers: Running statistics.
        input: The map that comes in.
        output: The map that goes out.
        elements: Elements of the output.
        in_place: Whether the output lies where the input lay.
        saved: Bytes kept for backward besides input and output.
        keeps_input: Whether backward needs the input.
        keeps_output: Whether backward needs the output.
        forward: Most bytes in forward above those alive before, the output included.
        backward: Most bytes in backward above those alive before, which include the output's
            gradient, where [0] neither input nor that gradient is held from outside, [1] the input
            is, [2] the gradient is, [3] both are.
        gradient: Bytes of the storage of the input's gradient.
        skip_gradients: Of a join, the bytes of the storage that each kept map's gradient holds
            until the stash, and the storage's number.
        shares_gradient: Of a join, whether one of these storages holds the input's gradient too.
        first: Cost as the first layer of a partition, where that differs: an activation is
            never in place there, and an image wants a gradient in all micro-batches but the first.
    """

    layer: Layer
    parameters: int
    buffers: int
    input: int
    output: int
    elements: int
    in_place: bool
    saved: int
    keeps_input: bool
    keeps_output: bool
    forward: int
    backward: tuple[int, int, int, int]
    gradient: int
    skip_gradients: tuple[tuple[int, int], ...] = ()
    shares_gradient: bool = False
    first: "LayerBytes | None" = None


class SameCosts:
    """Costs, which do not change, as a key: equal where they are one object, not looked into."""

    def __init__(self, costs: Sequence[LayerBytes]) -> None:
        self.costs = costs

    def __hash__(self) -> int:
        return id(self.costs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameCosts) and self.costs is other.costs
