"""Sweeps of an encoder next to lightstream, which streams tiles of encoders, in a run of both.

    pip install lightstream lightning torchvision
    python -m bench.speed.streaming resnet18 1024

ResNet's features of a random image, then a step (sum of squares of the features, forward and
backward) with norms frozen: CPU seconds of one thread, bytes of tensors that live at one time, and
how far the sums are apart. lightstream's constructor moves to CUDA, so its parts are
called here; its step ends on a CPU (1.0.7, torch 2.13, ResNet18, 1024²) in the gradient of weights,
`conv2d_weight`, with oneDNN's "could not create a primitive descriptor".
"""

import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from bench.exactness.networks import declare_operators
from tilenet.adoption.adopt import adopt
from tilenet.geometry.halo import context_of
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.sweep import Sweeps, strip_edges
from tilenet.geometry.tiles import Cut, cut
from tilenet.model.network import Network
from tilenet.model.origin import Origin
from tilenet.parallel.exchange.swept import Sweep, SweptPart
from tilenet.parallel.exchange.swept_training import SweptPipe
from tilenet.planning.memory.live import LiveBytes

TILE = 896  # a multiple of the stride, wider than what a tile of ResNet18 loses


def encoder(name: str) -> nn.Sequential:
    """ResNet's features, with random weights."""
    declare_operators()
    from torchvision import models

    torch.manual_seed(0)
    net = getattr(models, name)(weights=None)
    parts = "conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4"
    return nn.Sequential(*(getattr(net, part) for part in parts)).eval()


def streamed(name: str) -> Any:
    """The same encoder in lightstream's tiles."""
    from lightstream.core.constructor import StreamingConstructor
    from lightstream.core.scnn.scnn import StreamingCNN

    module, tile = encoder(name), (1, 3, TILE, TILE)
    made = StreamingConstructor(
        module, TILE, statistics_on_cpu=True, add_keep_modules=[nn.BatchNorm2d]
    )
    made.convert_to_identity(made.model)
    network = StreamingCNN(made.model, tile, copy_to_gpu=False, normalize_on_gpu=False)
    made.restore_model_layers(made.model_copy, network.stream_module)
    network.stream_module.load_state_dict(made.state_dict)
    return network


def of_lightstream(name: str, image: Tensor) -> Any:
    """Features by lightstream."""
    network = streamed(name)

    def features() -> float:
        return float(network.forward(image).square().double().sum())

    return {"features": features}, network.stream_module


def of_sweep(name: str, image: Tensor) -> Any:
    """Features and step by a sweep."""
    # Networks are adopted that give a cell per pixel: the last layer is left out again.
    adopted = adopt(nn.Sequential(encoder(name), nn.Upsample(scale_factor=32)), 3)
    layers, whole_network = adopted.layers[:-1], adopted.network().eval()
    network = Network(list(whole_network)[:-1], whole_network.mask_key)
    size = image.shape[2], image.shape[3]
    unit = context_of(adopted.layers).alignment_px
    sweeps = Sweeps(strip_edges(size[0], 128))
    whole = cut(*size, Cut(grid=(1, 1)), HaloRule(0, unit))
    pipe = SweptPipe(network, layers, [torch.device("cpu")], "float32", lambda rows, cols: sweeps)

    def features() -> float:
        part = SweptPart(size, strip_edges(size[0], 64))
        sweep, total = Sweep(layers, network, part), 0.0
        for plan in list(sweep.strips):
            with torch.inference_mode():
                rows = image[:, :, plan.image[0] : plan.image[1]]
                total += float(sweep.pass_strip(rows, plan).square().double().sum())
        return total

    def step() -> float:
        network.zero_grad()
        total = pipe(image, Origin((0,), whole, (0,)), lambda found, _: found.square().sum())
        total.backward()  # type: ignore[no-untyped-call]
        return float(total.detach())

    return {"features": features, "step": step}, network


def main(name: str, side: int) -> None:
    """Print each figure as it is measured."""
    torch.set_num_threads(1)
    image = torch.randn(1, 3, side, side)
    for way in (of_sweep, of_lightstream):
        works, network = way(name, image)
        for what, run in works.items():
            began = time.process_time()
            total = run()
            seconds = time.process_time() - began
            with LiveBytes() as live:
                run()
            sizes = [p.grad.norm() for p in network.parameters() if p.grad is not None]
            print(
                f"{name}, {side}², {way.__name__}, {what}: {seconds:.2f} s, "
                f"{live.peak / 2**20:.0f} MiB, sum {total:.8g}, "
                f"gradients {float(torch.stack(sizes).norm()) if sizes else 0:.6g}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
