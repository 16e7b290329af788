"""Bytes of a training step by strips: what is predicted is what lives, tensor by tensor."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from test_kept_maps import Gates
from torch import Tensor
from zoo import network

from tilenet.adoption.adopt import adopt
from tilenet.geometry.halo import context_of
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.layers import Layer
from tilenet.geometry.sweep import Sweeps, strip_edges
from tilenet.geometry.tiles import Cut, cut
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.geometry.windows import Window
from tilenet.model.loss import Loss
from tilenet.model.network import Network, build_network
from tilenet.model.origin import Origin
from tilenet.parallel.exchange.swept_training import SweptPipe
from tilenet.planning.memory.live import LiveBytes
from tilenet.planning.memory.sweeps.trained_sweeps import (
    ALL_CELLS,
    maps_to_keep,
    plan_sweeps,
    trained_bytes,
)

SIZE = 480, 96
OURS = {
    "nearest": UNetOptions(3, base=8, bands=3, classes=4, norm="batch"),
    "bilinear": UNetOptions(2, base=6, bands=3, classes=4, upsampling="bilinear"),
    "transposed": UNetOptions(3, base=8, bands=3, classes=4, upsampling="transposed"),
}
AVERAGED = "gates", "gated", "pyramid"  # by their averages of the whole image swept in parts
# Cells of maps to keep, and rows of strips: each network meets low strips and high ones. With some
# cells the full-size map is computed again, or the second sweep's too.
STEPS = [
    *(("nearest", 0, 64), ("nearest", 0, 160), ("bilinear", 0, 32), ("bilinear", 0, 160)),
    *(("transposed", 0, 64), ("transposed", 0, 160), ("residual", 0, 32), ("residual", 0, 160)),
    *(("channels", 0, 64), ("channels", 0, 160), ("between", 0, 32), ("between", 0, 160)),
    *(("resized", 0, 64), ("resized", 0, 160), ("gated", 0, 64), ("pyramid", 0, 160)),
    *(("gates", ALL_CELLS, 32), ("gated", ALL_CELLS, 160), ("pyramid", ALL_CELLS, 64)),
    *(("gates", 290_884, 64), ("gates", 72_721, 160), ("pyramid", 136_097, 32)),
]


def built(name: str) -> tuple[tuple[Layer, ...], Network]:
    if name in OURS:
        layers = unet_layers(OURS[name])
        net = build_network(layers)
    else:
        adopted = adopt(Gates() if name == "gates" else network(name, drops=False), 3)
        layers, net = adopted.layers, adopted.network()
    net.train()
    for part in net:
        if isinstance(part, torch.nn.BatchNorm2d):
            part.eval()
    return layers, net


LOSS = Loss(("ce",), 4, 255)


def measured_by(labels: Tensor) -> Callable[[Tensor, Window], Tensor]:
    """The loss of a run, whose labels (1, H, W) are of few bits until they are taken."""

    def loss(logits: Tensor, own: Window) -> Tensor:
        rows = slice(own.row, own.row + own.height)
        return LOSS.sums(logits.to(torch.float32), labels[:, rows])[0]

    return loss


def bytes_of_step(layers: tuple[Layer, ...], net: Network, sweeps: Sweeps, precision: str) -> int:
    image, labels = torch.randn(1, 3, *SIZE), torch.randint(0, 2, (1, *SIZE), dtype=torch.uint8)
    rule = HaloRule(0, context_of(layers).alignment_px)
    pipe = SweptPipe(net, layers, [torch.device("cpu")], precision, lambda rows, cols: sweeps)
    with LiveBytes() as live:
        origin = Origin((0,), cut(*SIZE, Cut(grid=(1, 1)), rule), (0,))
        pipe(image, origin, measured_by(labels)).backward()  # type: ignore[no-untyped-call]
    return live.peak


@pytest.mark.parametrize(("name", "most_cells", "strip_rows"), STEPS)
def test_bytes_of_a_step(name: str, most_cells: int, strip_rows: int) -> None:
    layers, net = built(name)
    kept = maps_to_keep(layers, *SIZE, most_cells) if most_cells else {}
    live = bytes_of_step(layers, net, Sweeps(strip_edges(SIZE[0], strip_rows), kept), "float32")
    predicted = trained_bytes(layers, *SIZE, strip_rows, 4, most_cells)
    # What layers take of the whole image, some values a channel, does not count.
    least = -0.015 if name in (*AVERAGED, "channels") else 0
    assert least <= predicted / live - 1 <= 0.05


@pytest.mark.parametrize(
    ("name", "strip_rows"), [("nearest", 160), ("bilinear", 32), ("transposed", 64)]
)
def test_bytes_of_a_step_of_half_precision(name: str, strip_rows: int) -> None:
    """Losses are taken in the parameters' dtype, whose logits are twice as large."""
    layers, net = built(name)
    live = bytes_of_step(layers, net, Sweeps(strip_edges(SIZE[0], strip_rows)), "bfloat16")
    assert 0 <= trained_bytes(layers, *SIZE, strip_rows, 2) / live - 1 <= 0.05


def test_where_not_all_maps_fit_some_are_kept() -> None:
    layers, _ = built("gates")
    rows = plan_sweeps(layers, 2048, 2048, 4).edges[1]
    all_kept = trained_bytes(layers, 2048, 2048, rows, 4, ALL_CELLS)  # of half a device

    def plan(device_bytes: int) -> list[list[int]]:
        kept = plan_sweeps(layers, 2048, 2048, 4, device_bytes).kept_maps
        return [sorted(maps) for maps in kept.values()]

    assert plan(2 * all_kept) == [[2, 5], [2, 12]]
    assert plan(2 * all_kept - 2) == [[5], [12]]
    assert plan(0) == []


class Widening(torch.nn.Module):
    """Gates behind strides, with ever more channels: the last map is the smallest."""

    def __init__(self) -> None:
        super().__init__()
        widths = 2, 16, 16, 32
        pairs = list(pairwise(widths))
        self.first = torch.nn.Conv2d(3, widths[0], 3, padding=1)
        self.convs = torch.nn.ModuleList(
            torch.nn.Conv2d(a, b, 3, stride=2 if b > a else 1, padding=1) for a, b in pairs
        )
        self.gates = torch.nn.ModuleList(torch.nn.Conv2d(b, b, 1) for _, b in pairs)
        self.last = torch.nn.Conv2d(widths[-1], 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        for conv, gate in zip(self.convs, self.gates, strict=True):
            x = conv(x).relu()
            x = x * gate(x.mean((2, 3), keepdim=True)).sigmoid()
        return self.last(F.interpolate(x, scale_factor=4.0))  # type: ignore[no-any-return]


def test_of_sets_that_fit_the_one_with_least_work_is_kept() -> None:
    """Not the one with most cells, from whose early map the wide layers are computed again."""
    layers = adopt(Widening(), 3).layers
    rows = plan_sweeps(layers, 4096, 4096, 4, 1 << 60).edges[1]
    all_kept = trained_bytes(layers, 4096, 4096, rows, 4, ALL_CELLS)
    for device_bytes, wanted in (
        (2 * all_kept, [[4], [11], [18]]),
        (2 * all_kept - 2, [[], [], [18]]),
    ):
        kept = plan_sweeps(layers, 4096, 4096, 4, device_bytes).kept_maps
        assert [sorted(maps) for maps in kept.values()] == wanted
