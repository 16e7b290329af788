"""The tracker of live storages, on tensors whose lives are known."""

import gc
import random

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tilenet.planning.memory.live import LiveBytes


def test_a_storage_counts_once_while_anything_views_it() -> None:
    with LiveBytes() as live:
        x = torch.randn(7, 11)
        view = x[2:].t()
        assert live.current == 7 * 11 * 4
        del x
        assert live.current == 7 * 11 * 4
        y = view.double()
        assert live.current == 7 * 11 * 4 + 5 * 11 * 8
        del view
        assert live.current == 5 * 11 * 8
        y.add_(1)
        assert live.current == y.nbytes
    assert live.peak == 7 * 11 * 4 + 5 * 11 * 8


def test_what_was_there_before_counts_only_when_charged() -> None:
    before = torch.randn(9, 5)
    other = torch.randn(3)
    with LiveBytes() as live:
        view = before[1:]
        view.mul_(2)
        assert live.current == 0
        live.charge([before, view, other], 4)
        assert live.current == before.nbytes + other.nbytes
        assert live.current_of[4] == live.current
        assert live.owner_of(view) == 4


def test_an_address_that_is_used_again_is_another_storage() -> None:
    with LiveBytes() as live:
        for _ in range(200):
            x = torch.empty(1000)
            assert live.current == 4000
            del x
    assert live.peak == 4000
    assert live.current == 0


def test_bytes_go_to_their_owners() -> None:
    def same(func: object, given: list[Tensor]) -> int:
        owners = [live.owner_of(x) for x in given]
        return next((owner for owner in owners if owner is not None), live.owner)

    with LiveBytes(same) as live:
        live.owner = 1
        x = torch.randn(10)
        live.owner = 2
        y = torch.randn(100)
        z = x * 2
        assert live.current_of == {1: 80, 2: 400}
        del x, z
        live.reset_peaks()
        z = y + y
        del y
    assert live.peak_of == {1: 0, 2: 800}
    assert live.peak == 800
    assert z.shape == (100,)


def run(seed: int, precision: torch.dtype) -> tuple[int, int]:
    """Peak and rest of a random network's training step."""
    draw = random.Random(seed)
    width, size = draw.randint(1, 6), draw.randint(9, 31)
    norms = [nn.InstanceNorm2d(width), nn.BatchNorm2d(width), nn.Identity()]
    layers = [
        nn.Conv2d(3, width, 3),
        draw.choice(norms),
        nn.LeakyReLU(inplace=draw.random() < 0.5),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(width, width, 2, 2),
        nn.Upsample(scale_factor=2, mode=draw.choice(["nearest", "bilinear"])),
        nn.Conv2d(width, 2, 1),
    ]
    net = nn.Sequential(*layers)
    with LiveBytes() as live:
        x = torch.randn(draw.randint(1, 3), 3, size, size + 5)
        mask = torch.tensor([draw.random() for _ in range(size)])
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            loss = net(x).float().square().sum() * mask.sum()
        loss.backward()
        del loss, x, mask
        for parameter in net.parameters():
            parameter.grad = None
        gc.collect()
    return live.peak, live.current


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_fake_tensors_live_as_long_as_real_ones(seed: int, precision: torch.dtype) -> None:
    real = run(seed, precision)
    with FakeTensorMode():
        fake = run(seed, precision)
    assert fake == real
    assert real[0] > 0
    assert real[1] == 0
