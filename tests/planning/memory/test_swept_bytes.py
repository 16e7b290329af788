"""The bytes of a sweep: predicted and counted, operation by operation."""

from dataclasses import replace

import pytest
import torch

from tilenet.geometry.layers import Layer
from tilenet.geometry.sweep import strip_edges
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.model.network import build_network
from tilenet.parallel.exchange.swept import Sweep
from tilenet.planning.memory.live import LiveBytes
from tilenet.planning.memory.swept import swept_bytes

OPTIONS = UNetOptions(poolings=3, base=8, bands=4, classes=5)


def counted_bytes(layers: tuple[Layer, ...], size: tuple[int, int], strip_rows: int) -> int:
    network, edges = build_network(layers).eval(), strip_edges(size[0], strip_rows)
    sweep, live = Sweep(layers, network, size, edges), LiveBytes()
    done = 0
    with torch.inference_mode(), live:
        for first in range(0, 2 * size[0], strip_rows):
            rows = min(strip_rows, size[0] - first)
            shape = 1, layers[0].in_channels, rows, size[1]
            done += sweep.feed(torch.randn(shape) if rows > 0 else None).shape[2]
            if done == size[0]:
                break
    assert done == size[0]
    return live.peak


@pytest.mark.parametrize("strip_rows", [16, 40, 64])
@pytest.mark.parametrize("upsampling", ["nearest", "bilinear", "transposed"])
def test_predicted_and_counted(upsampling: str, strip_rows: int) -> None:
    layers = unet_layers(replace(OPTIONS, norm="batch", upsampling=upsampling))
    counted = counted_bytes(layers, (512, 256), strip_rows)
    predicted = swept_bytes(layers, 512, 256, strip_rows, 4)
    assert 0.98 * counted <= predicted <= counted


def test_a_tall_image_takes_no_more() -> None:
    layers = unet_layers(replace(OPTIONS, norm="batch"))
    assert swept_bytes(layers, 512, 256, 64, 4) == swept_bytes(layers, 1 << 16, 256, 64, 4)
