"""Steps that swap stay within the limit that they were planned for, as counted on real tensors."""

import random
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from test_dry_run import random_balance, random_network

from tilenet.dry_run import measured_run
from tilenet.parallel.cell_actions import acting
from tilenet.parallel.pipeline_store import HostStore
from tilenet.parallel.slabs import FileSlabs
from tilenet.parallel.swap import Swapper
from tilenet.planning.layer_bytes import LayerBytes, layer_bytes
from tilenet.planning.memory import partition_bytes
from tilenet.planning.roofline import LayerTime
from tilenet.planning.swap_plan import Speeds, SwapPlan, plan_swaps

CPU = torch.device("cpu")


def measured(case: dict[str, Any], plan: SwapPlan, folder: Path) -> tuple[int, ...]:
    """Peaks of the partitions when the plan is carried out."""
    swapper = Swapper(0, 0, 0, FileSlabs(str(folder)))
    actions = [action for part in plan.partitions for _, action in part.modules]

    @contextmanager
    def context(pipe: Any) -> Any:
        with acting([cell for part in pipe.partitions for cell in part], actions, swapper):
            yield

    stores = [HostStore(swapper.copies, CPU) for _ in case["balance"]] if plan.stored else None
    cells = [[size for size, _ in part.modules] for part in plan.partitions]
    found = measured_run(**case, stores=stores, cells=cells, acting=context)
    assert swapper.statistics.host_bytes == 0
    swapper.close()
    return found.partitions


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
        peaks = measured(case, plan, tmp_path)
        for part, peak in zip(plan.partitions, peaks, strict=True):
            assert part.device_bytes <= limit
            assert peak <= 1.0002 * part.device_bytes + 256  # scalars, and statistics of norms
    assert fitting >= 7
