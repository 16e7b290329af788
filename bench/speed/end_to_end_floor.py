"""The floor under a run: the same layers in bare torch, with nothing around them.

    mpiexec -n RANKS python -m bench.speed.end_to_end_floor RUN CROP_PX BATCH STEPS H W TILES KEEP

Each rank by itself, on pixels that are in memory and are the same each time: STEPS steps of its
share of BATCH crops at once (forward, cross-entropy, backward, AdamW), and TILES forward passes
over H × W. With KEEP of 1 malloc keeps large buffers, as tilenet has it; with 0 it gives them back
to the system and takes them again in each layer. No rank talks to another, nothing is read,
standardised, summed or written. Rank 0 prints the slowest rank's seconds of a step and of a tile.
"""

import json
import sys
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


def main() -> None:
    """Measure both on all ranks at once."""
    run, *numbers = sys.argv[1:]
    crop_px, batch, steps, height, width, tiles, keep = map(int, numbers)
    if keep:
        keep_freed_buffers()
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    record = NetworkRecord.from_json(load_json(Path(run) / "last" / "network.json"))
    network = Bare(record.layers)
    comm.Barrier()
    share = -(-batch // comm.size)
    step_s = train(network, share, crop_px, len(record.classes), steps)
    comm.Barrier()
    tile_s = predict(network, height, width, tiles)
    found = comm.gather((step_s, tile_s))
    if found is not None:
        slowest = [max(some) for some in zip(*found, strict=True)]
        print(json.dumps(dict(zip(("step_s", "tile_s"), slowest, strict=True))))


if __name__ == "__main__":
    main()
