"""Seconds that each layer takes, by the roofline: arithmetic or memory, whichever takes longer.

S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009. Estimates for choosing between
plans on a machine that is not at hand; unless the machine's `kernel_s` holds the cost of launching,
tiles of a few hundred pixels look faster than they are. `profile.py` reads times that were measured
instead.
"""

from dataclasses import dataclass, replace
from math import prod

from tilenet.errors import TilenetError
from tilenet.geometry.layers import (
    Activation,
    Cellwise,
    Conv,
    Dropout,
    Expand,
    GlobalPool,
    Join,
    Layer,
    Norm,
    Pool,
    TransposedConv,
    Upsample,
)
from tilenet.geometry.maps import MapShape, map_shapes
from tilenet.planning.machines.machine import Machine
from tilenet.planning.time.layer_time import LayerTime

ITEM_BYTES = {"float32": 4, "tf32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
INDEX_BYTES = 8  # of a maximum pool's indices


@dataclass(frozen=True)
class Kernel:
    """One pass over the device: operations, and bytes read or written."""

    operations: float
    num_bytes: float

    def seconds(self, precision: str, machine: Machine) -> float:
        """The longer of computing and moving."""
        busy_s = machine.memory_s(self.num_bytes)
        if self.operations:
            busy_s = max(machine.maths_s(self.operations, precision), busy_s)
        return max(busy_s, machine.kernel_s) if busy_s else 0.0


def roofline(
    layers: tuple[Layer, ...],
    height: int,
    width: int,
    precision: str,
    machine: Machine,
    tiles: int = 1,
) -> tuple[LayerTime, ...]:
    """Seconds of each layer, forward and backward, for a batch of tiles of (height, width) pixels.

    Gradients with respect to the image are not computed, so that whatever stands before the first
    trained layer has no backward, and that layer itself only its weights' gradient.

    Raises:
        TilenetError: The precision is unknown, or the machine has no peak for it.
    """
    if precision not in ITEM_BYTES:
        raise TilenetError(
            f"precision must be one of {', '.join(ITEM_BYTES)} (precision: {precision}); nearest: "
            "float32"
        )
    # As if the tiles of a batch lay below one another: only cells count.
    maps = map_shapes(layers, height, width)
    shapes = [replace(shape, rows=tiles * shape.rows) for shape in maps]
    times = []
    trained = False
    for layer, before, after in zip(layers, shapes, shapes[1:], strict=False):
        forward, to_weights, to_input = _kernels(layer, before, after, ITEM_BYTES[precision])
        backward = [*to_weights, *(to_input if trained else [])]
        times.append(
            LayerTime(
                sum(kernel.seconds(precision, machine) for kernel in forward),
                sum(kernel.seconds(precision, machine) for kernel in backward),
            )
        )
        trained = trained or layer.num_parameters > 0
    return tuple(times)


def _kernels(
    layer: Layer, before: MapShape, after: MapShape, item_bytes: int
) -> tuple[list[Kernel], list[Kernel], list[Kernel]]:
    """Forward, the weights' gradient, the input's gradient."""
    before_bytes = before.num_elements * item_bytes
    after_bytes = after.num_elements * item_bytes
    if isinstance(layer, (Conv, TransposedConv)):
        weight_bytes = layer.num_parameters * item_bytes
        kernel = Kernel(
            _convolution_operations(layer, before, after),
            before_bytes + weight_bytes + after_bytes,
        )
        # Each of the three reads two of (input, weights, output) or their gradients and writes
        # the third.
        return [kernel], [kernel], [kernel]
    if isinstance(layer, Cellwise):
        # As if each step moved the map, and each matrix among the weights met each cell.
        numbers = sum(prod(shape) for _, shape, _ in layer.weights if len(shape) > 1)
        cells = after.rows * after.cols
        kernel = Kernel(2 * numbers * cells, len(layer.steps) * (before_bytes + after_bytes))
        return [kernel], [], [kernel, kernel]
    forward, backward = _maps_moved(layer, before_bytes, after_bytes, item_bytes)
    return [Kernel(0, forward)], [], [Kernel(0, backward)]


def _convolution_operations(
    layer: Conv | TransposedConv, before: MapShape, after: MapShape
) -> float:
    """Multiplications and additions."""
    # a transposed convolution spreads every input cell, a convolution gathers every output cell
    cells = before if isinstance(layer, TransposedConv) else after
    numbers = layer.num_parameters - layer.bias * layer.out_channels
    if isinstance(layer, Conv):
        numbers = prod(layer.kernel_shape)
    return 2 * numbers * cells.rows * cells.cols


def _maps_moved(layer: Layer, before: float, after: float, item_bytes: int) -> tuple[float, float]:
    """Bytes that a layer without arithmetic to speak of moves forward and backward."""
    if isinstance(layer, Norm):
        # The statistics need a pass of their own, over the map and, backward, over both the map
        # and its gradient.
        return 2 * before + after, 2 * (before + after) + before
    if isinstance(layer, Activation):
        return before + after, before + 2 * after  # its sign is read off the saved output
    if isinstance(layer, Dropout | Upsample | GlobalPool | Expand):
        return before + after, before + after  # the mask is one value a channel
    if isinstance(layer, Join):
        # All maps are read, and written once more.
        return (0, 0) if layer.how == "take" else (2 * after, 2 * after)
    if isinstance(layer, Pool):
        if layer.in_blocks:
            # Rows, then columns; backward columns, their gradients, and the map once more.
            return 2 * before + after, 4 * before + after
        indices = after / item_bytes * INDEX_BYTES if layer.mode == "max" else 0
        return before + after + indices, before + after + indices
    return 0, 0  # a stash hands its map on
