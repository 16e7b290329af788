"""Convolutions that only move cells give what torch's give, of finite maps."""

import random

import pytest
import torch
import torch.nn.functional as F

from tilenet.geometry.layers import Conv
from tilenet.model.cellwise import taps_of
from tilenet.model.dropout import MaskKey
from tilenet.model.modules import take_cells
from tilenet.model.network import build_layer


def drawn(rng: random.Random) -> tuple[Conv, torch.Tensor]:
    """A layer with one 1 in each of some kernels, as wide and high as it likes, and its kernel."""
    channels, count = rng.randint(1, 3), rng.randint(1, 4)
    high, wide, stride = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 3)
    kernels = torch.zeros(count, 1, high, wide, dtype=torch.bool)
    for kernel in kernels:
        kernel[0, rng.randrange(high), rng.randrange(wide)] = True
    dilations = [rng.randint(1, 3), rng.randint(1, 3)]
    pads = [rng.randint(0, dilation * 2) for dilation in dilations]
    steps = (
        ("constant", ("list", *kernels.flatten().tolist()), ("list", *kernels.shape)),
        ("repeat.default", ("value", 0), ("list", channels, 1, 1, 1)),
    )
    layer = Conv(
        channels, channels * count, high, stride, dilations[0], pads[0], bias=False,
        groups=channels, extra=rng.randint(0, 1), cols=(wide, dilations[1], pads[1]), steps=steps,
    )  # fmt: skip
    return layer, kernels.double().repeat(channels, 1, 1, 1)


@pytest.mark.parametrize("seed", range(60))
def test_cells_are_those_of_a_convolution(seed: int) -> None:
    layer, kernel = drawn(random.Random(seed))
    taps = taps_of(layer)
    assert len(taps) * layer.in_channels == layer.out_channels
    size = [random.Random(seed + 99).randint(1, 9) + 9 for _ in range(2)]
    torch.manual_seed(seed)
    x = torch.randn(2, layer.in_channels, *size, dtype=torch.float64, requires_grad=True)
    pads = layer.padding, layer.along_cols.padding
    wide = F.pad(x, (pads[1], pads[1] + layer.extra, pads[0], pads[0] + layer.extra))
    dilation = layer.dilation, layer.along_cols.dilation
    wanted = F.conv2d(wide, kernel, None, layer.stride, 0, dilation, layer.groups)
    found = build_layer(layer, 0, MaskKey())(x)
    assert torch.equal(found, wanted)
    assert torch.equal(take_cells(wide, layer, taps, pads=False), wanted)
    y = torch.randn_like(wanted)
    (ours,) = torch.autograd.grad(found, x, y)
    (theirs,) = torch.autograd.grad(wanted, x, y)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
