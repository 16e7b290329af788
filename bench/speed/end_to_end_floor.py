"""The floor under a run: the same layers in bare torch, with nothing around them.

Each rank by itself, on pixels that are in memory and are the same each time: steps of its share of
a batch of crops at once (forward, cross-entropy, backward, AdamW), and forward passes over tiles.
Malloc keeps large buffers, as tilenet has it, or gives them back to the system and takes them again
in each layer. No rank talks to another, nothing is read, standardised, summed or written. Seconds
of a step and of a tile are those of the slowest rank.
"""

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

from tilenet.geometry.layers import Activation, Conv, Dropout, Join, Layer, Pool, Stash, Upsample
from tilenet.parallel.ranks.devices import keep_freed_buffers
from tilenet.storage.checkpoints import load_json
from tilenet.storage.network_json import NetworkRecord

LABELLED = 0.6  # of the demo's pixels, which costs nothing


class Bare(nn.Module):
    """Torch's own modules in the order of the layers."""

    def __init__(self, layers: tuple[Layer, ...]) -> None:
        super().__init__()
        self.layers = layers
        self.made = nn.ModuleList(_module(layer) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K, H, W) of (B, C, H, W)."""
        stashed: dict[str, Tensor] = {}
        for layer, module in zip(self.layers, self.made, strict=True):
            if isinstance(layer, Stash):
                stashed[layer.name] = x
            elif isinstance(layer, Join):
                x = torch.cat((x, *(stashed.pop(name) for name in layer.kept)), dim=1)
            else:
                x = module(x)
        return x


def _module(layer: Layer) -> nn.Module:
    match layer:
        case Conv():
            return nn.Conv2d(
                layer.in_channels, layer.out_channels, layer.kernel, layer.stride,
                layer.padding, layer.dilation, bias=layer.bias,
            )  # fmt: skip
        case Pool(mode="max"):
            return nn.MaxPool2d(layer.kernel, layer.stride, layer.padding)
        case Upsample():
            return nn.Upsample(scale_factor=layer.factor, mode=layer.mode)
        case Dropout():
            return nn.Dropout2d(layer.probability)
        case Activation():
            return nn.LeakyReLU(layer.slope, inplace=True)
        case Stash() | Join():
            return nn.Identity()
        case _:
            raise SystemExit(f"no bare module for a layer of kind {layer.kind}")


def train(network: Bare, crops: int, side: int, classes: int, steps: int) -> float:
    """Seconds of a step."""
    bands = network.layers[0].in_channels
    x, target = torch.randn(crops, bands, side, side), torch.randint(classes, (crops, side, side))
    target[torch.rand(target.shape) > LABELLED] = 255
    optimizer = torch.optim.AdamW(network.parameters(), 1e-4)
    network.train()
    began = 0.0
    for step in range(steps + 1):
        if step == 1:  # the first allocates
            began = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x), target, ignore_index=255)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return (time.perf_counter() - began) / steps


def predict(network: Bare, height: int, width: int, tiles: int) -> float:
    """Seconds of a tile."""
    x, began = torch.randn(1, network.layers[0].in_channels, height, width), 0.0
    network.eval()
    with torch.inference_mode():
        for tile in range(tiles + 1):
            if tile == 1:
                began = time.perf_counter()
            network(x).argmax(1).byte()
    return (time.perf_counter() - began) / tiles


def floor(
    run: str, crop_px: int, batch: int, steps: int, side: int, tiles: int, keep: bool
) -> dict[str, float]:
    """Measure both on all ranks at once."""
    if keep:
        keep_freed_buffers()
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    record = NetworkRecord.from_json(load_json(Path(run) / "last" / "network.json"))
    network = Bare(record.layers)
    comm.Barrier()
    step_s = train(network, -(-batch // comm.size), crop_px, len(record.classes), steps)
    comm.Barrier()
    found = comm.allgather((step_s, predict(network, side, side, tiles)))
    slowest = [max(some) for some in zip(*found, strict=True)]
    return dict(zip(("step_s", "tile_s"), slowest, strict=True))
