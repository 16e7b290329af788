"""What ranks are predicted to send and wait for, against what bench/speed/exchange.py measured."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from questions import small_machine

from tilenet.geometry.halo import context_of
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.tiles import Cut, Tiling, cut
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.planning.estimate import Estimator
from tilenet.planning.plan import Layout, Question
from tilenet.planning.time.messages import Link, halo_times, norm_times

MEASURED = Path(__file__).resolve().parents[3] / "bench" / "results" / "exchange.json"
SIDE = 1024
COUNTING = Link(message_s=1, latency_s=0, bandwidth=inf)
MOVING = Link(message_s=0, latency_s=0, bandwidth=1)


def layers_of(norm: Any = "none") -> Any:
    return unet_layers(UNetOptions(poolings=4, base=16, classes=2, norm=norm))


def tiling_of(grid: tuple[int, int]) -> Tiling:
    unit = context_of(layers_of()).alignment_px
    return cut(SIDE, SIDE, Cut(grid=grid), HaloRule(0, unit, exchanged=True))


@pytest.mark.parametrize(("ranks", "grid"), [(1, (1, 1)), (2, (1, 2)), (4, (2, 2))])
@pytest.mark.parametrize("norm", ["none", "instance"])
def test_halos_are_those_that_ranks_sent(ranks: int, grid: tuple[int, int], norm: str) -> None:
    figures = json.loads(MEASURED.read_text())["figures"]
    assert figures["side_px"] == SIDE
    (row,) = (
        row
        for row in figures["step"]
        if (row["ranks"], row["norm"], row["way"]) == (ranks, norm, "exchange")
    )
    messages, sent = (
        sum(
            one.forward_s + one.backward_s
            for one in halo_times(layers_of(norm), tiling_of(grid), 4, link)
        )
        for link in (COUNTING, MOVING)
    )
    assert messages == 2 * row["messages"]  # between equal neighbours as many come as go
    assert sent / 2**20 == pytest.approx(row["sent_mib"], rel=1e-12)


def test_a_tile_amid_others_sends_to_eight_one_in_a_corner_to_three() -> None:
    counts = [
        max(one.forward_s for one in halo_times(layers_of(), tiling_of((k, k)), 4, COUNTING))
        for k in (1, 2, 3, 4)
    ]
    assert counts == [0, 2 * 3, 2 * 8, 2 * 8]


def test_messages_cost_what_loggp_says() -> None:
    link = Link(message_s=3, latency_s=5, bandwidth=2)
    assert link.messages_s(0, 0) == 0
    assert link.messages_s(4, 10) == 5 + 4 * 3 + 10 / 2
    assert link.sum_s(1, 100) == 0
    assert link.sum_s(2, 100) == 3 + 2 * 5 + 100 / 2
    assert link.sum_s(5, 100) == 3 + 6 * 5 + 2 * 4 / 5 * 100 / 2


def test_norms_sum_twice_forward_and_once_backward() -> None:
    link = Link(message_s=1, latency_s=0, bandwidth=inf)
    norms = 2 * 2 * 4 + 2  # two behind the convolutions of each level, the deepest once
    for norm, sums in (("none", 0), ("instance", norms), ("group", norms), ("batch", norms)):
        times = norm_times(layers_of(norm), 4, 8, link)
        assert sum(one.forward_s for one in times) == 2 * sums
        assert sum(one.backward_s for one in times) == sums
    wide = Link(message_s=0, latency_s=0, bandwidth=1)
    by_norm = {
        norm: sum(one.forward_s for one in norm_times(layers_of(norm), 4, 8, wide))
        for norm in ("instance", "group", "batch")
    }
    # Eight groups are fewer than channels; batch norm sums over more ranks.
    assert by_norm["group"] < by_norm["instance"]
    assert by_norm["batch"] == pytest.approx(by_norm["instance"] * (7 / 8) / (3 / 4))
    alone = norm_times(layers_of("instance"), 1, 8, link)
    assert all(one.forward_s == one.backward_s == 0 for one in alone)


def estimator(**changes: Any) -> Estimator:
    options = UNetOptions(poolings=2, convolutions=1, base=4, norm="instance")
    asked = Question(options, 8, (96, 96), small_machine(4, 2**30), partitions=1)
    return Estimator(replace(asked, **changes))


def test_a_plan_waits_for_halos_and_norms_where_there_are_any() -> None:
    layout = Layout((2, 2), 1, 1, "never")
    there = estimator(halo_mode="exchange")
    overlap, balance = estimator(), (len(there.layers),)
    exchange_s = there.exchange_s(layout, balance)
    assert exchange_s > overlap.exchange_s(layout, balance) > 0
    quick = replace(there.question.machine, latency_s=0, message_s=0)
    free = estimator(halo_mode="exchange", machine=replace(quick, host_bandwidth=1e29))
    step_s, pipeline_s, _ = there.step_s(layout, balance)
    assert pipeline_s - free.step_s(layout, balance)[1] == pytest.approx(exchange_s)
    assert step_s > pipeline_s
    alone = Layout((1, 1), 1, 1, "never")
    for one in (overlap, there):
        machine = replace(one.question.machine, devices_per_node=1)
        assert Estimator(replace(one.question, machine=machine)).exchange_s(alone, balance) == 0


def test_recomputation_exchanges_again() -> None:
    layout = Layout((2, 2), 1, 1, "never")
    there = estimator(halo_mode="exchange")
    balance, modes = (len(there.layers),), ("never", "always")
    once, twice = (there.exchange_s(replace(layout, checkpointing=c), balance) for c in modes)
    assert once < twice < 2 * once


def test_a_step_is_not_faster_than_its_tiles_are_read() -> None:
    layout = Layout((2, 2), 1, 1, "never")
    slow = estimator(machine=replace(small_machine(4, 2**30), file_bandwidth=1e3))
    balance = (len(slow.layers),)
    rows, cols = slow.read_px((2, 2))
    assert slow.read_s(layout) == 4 * rows * cols * 9 / 1e3
    assert slow.step_s(layout, balance)[0] == slow.read_s(layout)
    assert estimator().step_s(layout, balance)[0] > estimator().read_s(layout)
