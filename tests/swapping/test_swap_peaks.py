"""Steps that swap stay within the limit that they were planned for, as counted on real tensors."""

import random
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise, product
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from dry_run import measured_run
from test_dry_run import random_balance, random_network
from test_swaps_in_flight import LateStreams, Never

from tilenet.parallel.pipeline.layer_times import LayerTime
from tilenet.parallel.pipeline.skip_store import HostStore
from tilenet.parallel.swap.actions import acting
from tilenet.parallel.swap.host_pool import FileSlabs
from tilenet.parallel.swap.swapper import Swapper
from tilenet.planning.memory.layer import LayerBytes, layer_bytes
from tilenet.planning.memory.partition import partition_bytes
from tilenet.planning.swap.choose import predict
from tilenet.planning.swap.groups import layer_groups
from tilenet.planning.swap.plan import PartitionSwaps, Speeds, SwapPlan, plan_swaps, swap_everything

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
        streams = LateStreams(0)
        streams._chance = Never(0)
        swapper.copies._streams = streams  # type: ignore[assignment]
    actions = [action for part in plan.partitions for _, action in part.modules]

    @contextmanager
    def context(pipe: Any) -> Any:
        with acting([module for part in pipe.partitions for module in part], actions, swapper):
            yield

    stores = [HostStore(swapper.copies, CPU) for _ in case["balance"]] if plan.stored else None
    groups = [[size for size, _ in part.modules] for part in plan.partitions]
    found = measured_run(**case, stores=stores, groups=groups, acting=context)
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
    asked = case["balance"], case["micro_batches"], "always", "sgd"
    known, free = speeds(costs, draw), [inf] * 3
    plan = swap_everything(
        costs, *asked, free, replace(known, bandwidth=1e3)
    )  # slower than all else
    _, moved = measured(case, plan, tmp_path)
    assert moved == plan.swapped_bytes > 0
    for part, edge in zip(
        plan.partitions, pairwise([0, *accumulate(case["balance"])]), strict=True
    ):
        forward_s = sum(time.forward_s for time in known.times[slice(*edge)])
        out_s = part.swapped_bytes / case["micro_batches"] / 1e3
        assert part.forward_s >= out_s - forward_s
        assert (part.backward_s > 0) == (edge[0] > 0)  # the first one's images are not waited for
    # What leaves one comes in at another: forward and backward wait for as much.
    fast = swap_everything(costs, *asked, free, replace(known, bandwidth=1e15))
    assert all(part.forward_s == part.backward_s == 0 for part in fast.partitions)


def test_seconds_are_those_that_the_planner_simulates() -> None:
    draw = random.Random(7)
    slower = 0
    for _ in range(6):
        layers, many = random_network(draw), draw.randint(2, 4)
        costs, balance = layer_bytes(layers, 90, 77), [len(layers)]
        known = replace(speeds(costs, draw), bandwidth=1e8)
        (plain,) = partition_bytes(costs, balance, many, "never", "sgd")
        limit = 0.7 * plain.total
        plan = plan_swaps(costs, balance, many, "never", "sgd", [limit], lambda known=known: known)
        if plan is None:
            continue
        (part,) = plan.partitions
        groups = layer_groups(costs, known.times, 0, len(layers), 0)
        kept = predict(groups, ["keep"] * len(groups), 1e8, many)
        room = limit - (plain.total - kept.peak_bytes)
        wanted = predict(groups, part.actions, 1e8, many, room).seconds
        alone = sum(time.forward_s + time.backward_s for time in known.times)
        assert many * (alone + part.backward_s) == pytest.approx(wanted, rel=1e-12)
        slower += part.backward_s > 0
    assert slower >= 3


def test_only_groups_that_are_computed_again_are_one_module() -> None:
    part = PartitionSwaps((3, 2, 1, 2, 4), ("swap", "checkpoint", "keep", "both", "keep"), 0)
    assert [size for size, _ in part.modules] == [1, 1, 1, 2, 1, 2, 1, 1, 1, 1]
    assert [action for _, action in part.modules] == [
        *["swap"] * 3, "checkpoint", "keep", "both", *["keep"] * 4,
    ]  # fmt: skip


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
        case: dict[str, Any] = {
            "layers": layers,
            "tile": (draw.randint(64, 150), draw.randint(64, 150)),
            "balance": random_balance(draw, len(layers), 3) if seed % 2 else [len(layers)],
            "micro_batches": draw.randint(1, 4),
            "checkpointing": mode,
            "optimizer": draw.choice(["adamw", "sgd"]),
        }
        costs = layer_bytes(layers, *case["tile"])
        asked = case["balance"], case["micro_batches"], mode, case["optimizer"]
        limit = share * max(part.total for part in partition_bytes(costs, *asked))
        limits = [limit] * len(case["balance"])
        machine = speeds(costs, draw)
        plan = plan_swaps(costs, *asked, limits, lambda machine=machine: machine)
        if plan is None:
            continue
        assert not plan.idle
        fitting += 1
        peaks, moved = measured(case, plan, tmp_path)
        # Of a group that swaps next to one that keeps, what both have saved may go too, in vain.
        swapping = any("swap" in part.actions for part in plan.partitions)
        assert moved >= plan.swapped_bytes if swapping else moved == plan.swapped_bytes
        late, _ = measured(case, plan, tmp_path, late=True)
        for part, peak, most in zip(plan.partitions, peaks, late, strict=True):
            assert part.device_bytes <= limit
            assert peak <= 1.0002 * part.device_bytes + 256  # scalars, and statistics of norms
            assert most <= min(peak + part.in_flight_bytes, 1.02 * limit) + 256
    assert fitting >= 7
