"""Measure how long each layer takes on the device that is at hand."""

import statistics
import time
from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn

from tilenet.model.dtypes import AUTOCAST
from tilenet.model.gpipe import Batch, Namespace, SkipTracker, use_skip_tracker
from tilenet.model.network import Network
from tilenet.planning.time.layer_time import LayerTime


def measure_layers(
    network: Network, image: Tensor, precision: str, repeats: int = 5
) -> tuple[LayerTime, ...]:
    """Run layer after layer, forward and backward, each on the output of the one before.

    Only one layer's weights and maps are on the device at a time, and the skips, so that a network
    can be measured that could not be trained there.

    Args:
        network: Network in training mode, on any device; it has no gradients afterwards.
        image: (1, bands, H, W).
        precision: `bfloat16` and `float16` compute under autocast.
        repeats: Runs of each layer, after one that warms up.
    """
    network.mask_key.images = tuple(range(image.shape[0]))
    times = []
    x = image
    with use_skip_tracker(_KeptSkips()):
        for index, layer in enumerate(network):
            home = next(chain(layer.parameters(), layer.buffers()), image).device
            layer.to(image.device)
            forward, backward = [], []
            for run in range(repeats + 1):
                y, forward_s, backward_s = _run(layer, x, index > 0, precision)
                if run:
                    forward.append(forward_s)
                    backward.append(backward_s)
            x = y
            layer.zero_grad()
            layer.to(home)
            times.append(LayerTime(statistics.median(forward), statistics.median(backward)))
    return tuple(times)


class _KeptSkips(SkipTracker):  # type: ignore[misc]
    """Skips that may be popped once per run, each time as the start of a graph of its own."""

    def load(self, batch: Batch, ns: Namespace, name: str) -> Tensor:
        skip: Tensor = self.tensors[(ns, name)]
        return skip.detach().requires_grad_()


def _run(
    layer: nn.Module, x: Tensor, wants_gradient: bool, precision: str
) -> tuple[Tensor, float, float]:
    """The layer's output, seconds of forward, and seconds of backward."""
    leaf = x.detach().requires_grad_(wants_gradient)
    input_ = leaf.clone()  # an activation in place may not write into a leaf
    dtype = AUTOCAST.get(precision)

    def forward() -> Tensor:
        with torch.autocast(x.device.type, dtype, enabled=dtype is not None):
            output: Tensor = layer(input_)
        return output

    y, forward_s = _timed(forward, x.device)
    backward_s = 0.0
    if y.requires_grad:
        gradient = torch.randn_like(y)
        _, backward_s = _timed(lambda: y.backward(gradient), x.device)  # type: ignore[no-untyped-call]
    return y.detach(), forward_s, backward_s


def _timed(work: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    _wait(device)
    began = time.perf_counter()
    output = work()
    _wait(device)
    return output, time.perf_counter() - began


def _wait(device: torch.device) -> None:
    torch.get_device_module(device).synchronize(device)
