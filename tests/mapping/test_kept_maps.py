"""Sweeps for the averages of an image hand maps on, so that nothing is computed twice."""

from collections import Counter
from dataclasses import replace

import pytest
import sweeps
import torch
from torch import nn
from zoo import network

import tilenet.planning.maps.passes
from tilenet.adoption.adopt import adopt
from tilenet.geometry.layers import GlobalPool
from tilenet.geometry.maps import map_shapes
from tilenet.geometry.sweep import maps_before
from tilenet.parallel.exchange.swept import Sweep
from tilenet.planning.kept_maps import kept_cells, kept_maps
from tilenet.planning.maps.question import MapPlan

SIZE = 96, 61
AVERAGED = "gated", "pyramid", "looking", "grouped"


class Gates(nn.Module):
    """Gates behind strides, and a map from before them that is joined at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(6, 6, 3, stride=2, padding=1) for _ in range(2))
        self.gates = nn.ModuleList(nn.Conv2d(6, 6, 1) for _ in range(2))
        self.last = nn.Conv2d(12, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = kept = self.first(x).relu()
        for conv, gate in zip(self.down, self.gates, strict=True):
            x = conv(x).relu()
            x = x * gate(x.mean((2, 3), keepdim=True)).sigmoid()
        x = nn.functional.interpolate(x, scale_factor=4, mode="bilinear")
        return self.last(torch.cat([x, kept], 1))


def rows_computed(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """How often each row of each layer is computed from now on."""
    rows: Counter[tuple[int, int]] = Counter()
    right = Sweep._computed

    def computed(self, number, layer, done):  # type: ignore[no-untyped-def]
        rows.update((number, row) for row in range(*done.out))
        return right(self, number, layer, done)

    monkeypatch.setattr(Sweep, "_computed", computed)
    return rows


def counted(adopted, image, monkeypatch):  # type: ignore[no-untyped-def]
    """The map, its difference from the network's, and how often rows were computed at most."""
    with monkeypatch.context() as patch, torch.inference_mode():
        rows = rows_computed(patch)
        wanted = adopted.network(torch.float64).eval()(image)
        found = sweeps.swept_map(adopted, image)
    apart = float((found[0] - wanted[0]).abs().max() / wanted.abs().max())
    return found, apart, max(rows.values())


def adopted_on(name: str):  # type: ignore[no-untyped-def]
    torch.manual_seed(4)
    module = Gates().eval() if name == "gates" else network(name, drops=False)
    adopted = adopt(module, 3)
    unit = adopted.context.alignment_px
    return adopted, torch.randn(1, 3, SIZE[0] // unit * unit, SIZE[1] // unit * unit).double()


@pytest.mark.parametrize("name", ["gates", *AVERAGED])
def test_nothing_is_computed_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adopted, image = adopted_on(name)
    found, apart, times = counted(adopted, image, monkeypatch)
    assert apart <= 1e-12
    assert times == 1
    # Without memory for maps, all passes begin at the image, with the same numbers.
    monkeypatch.setattr(
        tilenet.planning.maps.passes, "kept_maps", lambda *args: kept_maps(*args[:-1], 0)
    )
    again, _, times = counted(adopted, image, monkeypatch)
    assert torch.equal(found, again)
    assert times > 1


def test_a_map_that_is_lost_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an interrupted run finished the pass that would have kept it."""
    adopted, image = adopted_on("gates")
    wanted, _, _ = counted(adopted, image, monkeypatch)
    right = sweeps.plan_passes

    def others(*args) -> MapPlan:  # type: ignore[no-untyped-def]
        plan = right(*args)
        return replace(plan, kept_maps=(frozenset(), *plan.kept_maps[1:]))

    monkeypatch.setattr(sweeps, "plan_passes", others)
    found, _, times = counted(adopted, image, monkeypatch)
    assert torch.equal(found, wanted)
    assert times == 2


@pytest.mark.parametrize("name", ["gates", *AVERAGED])
def test_the_maps_that_are_kept_fit(name: str) -> None:
    adopted, image = adopted_on(name)
    layers, size = adopted.layers, tuple(image.shape[2:])
    passes = [index for index, _ in enumerate(layers) if isinstance(layers[index], GlobalPool)]
    cells = [one.channels * one.rows * one.cols for one in map_shapes(layers, *size)]
    last = None
    for most in (0, 2_000, 20_000, 200_000, 10**9):
        there, work, together = frozenset[int](), 0, [0]
        sets = kept_maps(layers, passes, size, 1, most)
        for stop, kept in zip((*passes, len(layers)), (*sets, there), strict=True):
            computed, read = maps_before(layers, [stop], there)
            assert read <= there | {0}
            assert kept <= computed | there
            together.append(sum(cells[one] for one in kept | there))
            work, there = work + sum(cells[one] for one in computed), kept
        assert kept_cells(layers, sets, size) == max(together) <= most
        assert last is None or work <= last
        last = work
