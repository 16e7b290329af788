"""Floating-point operations of a rank: exchange and overlap against the whole image ÷ ranks.

Counted by torch's FlopCounterMode, forward and backward, on tensors without memory.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from tilenet.geometry.halo import context_of
from tilenet.geometry.halo_rule import HaloRule, halo_rule
from tilenet.geometry.layers import Layer
from tilenet.geometry.tiles import Cut, Tiling, cut
from tilenet.model.dropout import MaskKey
from tilenet.model.network import Network, build_layer
from tilenet.model.origin import Origin
from tilenet.parallel.exchange.network import spatial_network
from tilenet.parallel.pipeline.pipe import Pipe

__all__ = ["Work", "work_of"]

CPU, META = torch.device("cpu"), torch.device("meta")


@dataclass(frozen=True)
class Work:
    """Of the rank that has most of it, relative to the whole image ÷ ranks.

    Attributes:
        exchange: With halo_mode: exchange.
        overlap: With the exact halo.
        formula: The paper's E = (T/T′)² of the largest tile, same halo.
        own_area: Largest own area × ranks ÷ extended area: what alignment alone costs.
        halo_px: Of overlap.
    """

    exchange: float
    overlap: float
    formula: float
    own_area: float
    halo_px: int


def work_of(network: tuple[Layer, ...], size: int, grid: tuple[int, int]) -> Work:
    """Count for a network on a square image."""
    # What the counter does not see: sums, and products with masks.
    layers = tuple(layer for layer in network if layer.kind not in ("norm", "dropout"))
    context = context_of(layers)
    unit, ranks = context.alignment_px, grid[0] * grid[1]
    alone = cut(size, size, Cut(grid=(1, 1)), HaloRule(0, unit, exchanged=True))
    shared = cut(size, size, Cut(grid=grid), HaloRule(0, unit, exchanged=True))
    doubled = cut(size, size, Cut(grid=grid), halo_rule("exact", layers))
    whole = _operations(layers, *alone.extended) / ranks
    # More own pixels, or more neighbours: the busiest rank is one of these.
    numbers = range(ranks)
    inner = [n for n in numbers if 0 < n // grid[1] < grid[0] - 1 and 0 < n % grid[1] < grid[1] - 1]
    busiest = {max(some, key=lambda n: _area(shared, n)) for some in (numbers, inner)}
    read = doubled.tiles[0].read
    largest = max(_area(shared, number) for number in range(ranks))
    return Work(
        exchange=max(_operations(layers, size, size, shared, n) for n in busiest) / whole,
        overlap=_operations(layers, read.height, read.width) / whole,
        formula=doubled.work_ratio_tile,
        own_area=largest * ranks / (alone.extended[0] * alone.extended[1]),
        halo_px=context.halo_px,
    )


def _area(tiling: Tiling, number: int) -> int:
    own = tiling.tiles[number].own
    return own.height * own.width


def _operations(
    layers: tuple[Layer, ...],
    height: int,
    width: int,
    tiling: Tiling | None = None,
    tile: int = 0,
) -> int:
    """Of a step's forward and backward: plainly on so many pixels, or as a rank of a grid."""
    with META:  # parameters that are fake cannot be moved as a pipe moves them
        mask_key = MaskKey()
        modules = [build_layer(layer, i, mask_key) for i, layer in enumerate(layers)]
        network = Network(modules, mask_key)
    balance, origin = [len(layers)], Origin((0,))
    if tiling is not None:
        network = spatial_network(network, layers, balance, "exchange", None)
        origin = Origin((0,), tiling, (tile,))
        own = tiling.tiles[tile].own
        height, width = own.height, own.width
    pipe = Pipe(network.train(), balance, [META], inline=True)
    pipe.devices, pipe.partitions[0].device = (CPU,), CPU
    with FakeTensorMode():
        for module in network.modules():
            for name, tensor in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, nn.Parameter(torch.empty(tensor.shape)))
        image = torch.empty(1, layers[0].in_channels, height, width)
        with FlopCounterMode(display=False) as counter:
            (output,) = pipe([image], [origin])
            output.sum().backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())
