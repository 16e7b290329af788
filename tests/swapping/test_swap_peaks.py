"""Steps that swap stay within the limit that they were planned for, as counted on real tensors."""

import random
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from dry_run import measured_run
from test_dry_run import random_balance, random_network
from test_swaps_in_flight import LateStreams, Never

from tilenet.parallel.pipeline.host_store import HostStore
from tilenet.parallel.swap.host_pool import FileSlabs
from tilenet.parallel.swap.swap_in_forward import SwapInForward
from tilenet.parallel.swap.swapper import Swapper
from tilenet.planning.balance import blocks_of
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.layer_cost import LayerBytes
from tilenet.planning.swap.layers import saving_layers
from tilenet.planning.swap.plan import Demand, PartitionSwaps, Speeds, SwapPlan, plan_swaps
from tilenet.planning.swap.threshold import simulate
from tilenet.planning.time.layer_time import LayerTime

CPU = torch.device("cpu")


def measured(
    case: dict[str, Any], plan: SwapPlan, folder: Path, *, late: bool = False
) -> tuple[tuple[int, ...], int]:
    """Peaks of the partitions when the plan is carried out, and bytes that went out.

    Args:
        late: Copies out end when somebody waits for them.
    """
    # All partitions are on one device, and any of them may have all that is under way.
    most = min(part.in_flight_bytes for part in plan.partitions)
    swapper = Swapper(0, 0, 0, FileSlabs(str(folder)), {CPU: most})
    if late:
        swapper.copies._streams = LateStreams(Never(0))  # type: ignore[assignment]

    def context(pipe: Any) -> Any:
        parts = zip(pipe.partitions, plan.partitions, strict=True)
        layers = [layer for part, swaps in parts for layer in list(part)[: swaps.layers]]
        return SwapInForward(swapper).around(layers)

    stores = [HostStore(swapper.copies, CPU) for _ in case["balance"]] if plan.stored else None
    found = measured_run(**case, stores=stores, swapping=context)
    assert swapper.statistics.host_bytes == 0
    swapper.close()
    return found.partitions, swapper.statistics.out_bytes


@pytest.mark.parametrize("seed", range(4))
def test_a_store_moves_the_bytes_that_were_planned(tmp_path: Path, seed: int) -> None:
    draw = random.Random(300 + seed)
    layers = random_network(draw)
    case: dict[str, Any] = {
        "layers": layers,
        "tile": (draw.randint(64, 150), draw.randint(64, 150)),
        "balance": [third := len(layers) // 3, third + 1, len(layers) - 2 * third - 1],
        "micro_batches": draw.randint(2, 4),
        "checkpointing": "always",
        "optimizer": "sgd",
    }
    costs = layer_bytes(layers, *case["tile"])
    demand = Demand(costs, case["balance"], case["micro_batches"], "always", "sgd", range(3))
    known = speeds(costs, draw)
    slow, fast = (
        plan_swaps(demand, inf, lambda link=link: replace(known, bandwidth=link), everything=True)
        for link in (1e3, 1e15)  # slower than all else, and faster
    )
    plan = slow
    _, moved = measured(case, plan, tmp_path)
    assert moved == plan.swapped_bytes > 0
    for part, edge in zip(plan.partitions, blocks_of(demand.balance), strict=True):
        forward_s = sum(time.forward_s for time in known.times[slice(*edge)])
        out_s = part.swapped_bytes / case["micro_batches"] / 1e3
        assert part.forward_s >= out_s - forward_s
        assert (part.backward_s > 0) == (edge[0] > 0)  # the first one's images are not waited for
    # What leaves one comes in at another: forward and backward wait for as much.
    assert all(part.forward_s == part.backward_s == 0 for part in fast.partitions)


def test_seconds_are_those_that_the_planner_simulates() -> None:
    draw = random.Random(7)
    slower = 0
    for _ in range(6):
        layers, many = random_network(draw), draw.randint(2, 4)
        costs, balance = layer_bytes(layers, 90, 77), [len(layers)]
        known = replace(speeds(costs, draw), bandwidth=1e8)
        demand = Demand(costs, balance, many, "never", "sgd", [0])
        (plain,) = demand.parts()
        limit = 0.7 * plain.total
        plan = plan_swaps(demand, limit, lambda known=known: known)
        if plan is None:
            continue
        (part,) = plan.partitions
        saving = saving_layers(costs, known.times, 0, len(layers), 0)
        room = limit - plain.fixed
        wanted = simulate(saving, part.layers, 1e8, many, room).seconds
        alone = sum(time.forward_s + time.backward_s for time in known.times)
        assert many * (alone + part.backward_s) == pytest.approx(wanted, rel=1e-12)
        slower += part.backward_s > 0
    assert slower >= 3


def speeds(costs: tuple[LayerBytes, ...], draw: random.Random) -> Speeds:
    """A machine that computes 1 GB/s of maps, and copies faster or slower."""
    times = [LayerTime(cost.output / 1e9, 2 * cost.output / 1e9) for cost in costs]
    return Speeds(times, draw.choice([1e8, 1e9, 1e10]), 0)


@pytest.mark.parametrize("mode", ["never", "always"])
def test_steps_stay_within_their_limits(tmp_path: Path, mode: Any) -> None:
    fitting = 0
    for seed, share in product(range(8), (0.9, 0.75, 0.6, 0.5)):
        draw = random.Random(200 + seed)
        layers = random_network(draw)
        tile = draw.randint(64, 150), draw.randint(64, 110)
        balance = random_balance(draw, len(layers), 3) if seed % 2 else [len(layers)]
        many = draw.randint(1, 4)
        if mode == "always":  # what waits are inputs and skips of many micro-batches
            third, many = len(layers) // 3, draw.randint(4, 7)
            balance = [third, third, len(layers) - 2 * third]
        case: dict[str, Any] = {
            "layers": layers,
            "tile": tile,
            "balance": balance,
            "micro_batches": many,
            "checkpointing": mode,
            "optimizer": draw.choice(["adamw", "sgd"]),
        }
        costs = layer_bytes(layers, *case["tile"])
        asked = case["balance"], case["micro_batches"], mode, case["optimizer"]
        demand = Demand(costs, *asked, range(len(case["balance"])))
        limit = share * demand.peak
        machine = speeds(costs, draw)
        plan = plan_swaps(demand, limit, lambda machine=machine: machine)
        if plan is None:
            continue
        assert not plan.idle
        fitting += 1
        peaks, moved = measured(case, plan, tmp_path)
        # Of a layer that swaps next to one that keeps, what both have saved may go too, in vain.
        if not plan.swapped_layers:
            assert moved == plan.swapped_bytes
        assert moved >= plan.swapped_bytes
        late, _ = measured(case, plan, tmp_path, late=True)
        for part, peak, most in zip(plan.partitions, peaks, late, strict=True):
            assert part.device_bytes <= limit
            assert peak <= 1.0002 * part.device_bytes + 256  # scalars, and statistics of norms
            assert most <= min(peak + part.in_flight_bytes, 1.02 * limit) + 256
    assert fitting >= 7


@pytest.mark.parametrize("many", [1, 2])
def test_a_swapped_map_that_another_partition_pops_stays_until_it_is_there(
    tmp_path: Path, many: int
) -> None:
    draw = random.Random(5)  # the fullest moment is in the forward of an upper level's join
    layers = random_network(draw)
    tile = draw.randint(48, 120), draw.randint(48, 120)
    last = max(number for number, layer in enumerate(layers) if layer.names)
    balance, swapped = [last - 7, len(layers) - last + 7], last // 2 - 3
    costs = layer_bytes(layers, *tile)
    demand = Demand(costs, balance, many, "never", "sgd", range(2))
    saving = saving_layers(costs, speeds(costs, draw).times, 0, balance[0], 0)
    predicted = demand.parts()[0].fixed + simulate(saving, swapped, 1e30, many, 0).peak_bytes
    parts = [PartitionSwaps(swapped, predicted), PartitionSwaps(0, 0)]
    case: dict[str, Any] = {
        "layers": layers,
        "tile": tile,
        "balance": balance,
        "micro_batches": many,
        "checkpointing": "never",
        "optimizer": "sgd",
    }
    (needed, _), _ = measured(case, SwapPlan(len(layers), 0, 0, 0, False, parts), tmp_path)
    assert needed <= 1.0002 * predicted + 256
