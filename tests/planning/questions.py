"""Small random questions for the planner: devices so small that memory decides."""

from itertools import combinations, pairwise

import numpy as np

from tilenet.geometry.unet import UNetOptions
from tilenet.planning.machines.machine import Machine
from tilenet.planning.plan import Plan, Question
from tilenet.planning.search import Search


def every_balance(num_layers: int, num_partitions: int) -> list[tuple[int, ...]]:
    """All ways to cut so many layers."""
    inner = combinations(range(1, num_layers), num_partitions - 1)
    return [tuple(b - a for a, b in pairwise((0, *cuts, num_layers))) for cuts in inner]


def every_plan(search: Search) -> list[Plan]:
    """Plans of all layouts that fit: by seconds, equal ones by partitions, then by bytes."""

    def rank(plan: Plan) -> tuple[float, int, int]:
        return float(f"{plan.step_s:.8e}"), plan.layout.partitions, plan.device_bytes

    plans = [search.plan(layout) for layout in search.layouts()]
    return sorted((plan for plan in plans if plan is not None), key=rank)


def check_bounds(search: Search, seed: int) -> None:
    """Of every fifth layout, and of some balances of each: fast ones, lean ones, and odd ones."""
    rng = np.random.default_rng(seed)
    for layout in list(search.layouts())[::5]:
        endless = search.bounds.seconds(layout)
        balances = every_balance(len(search.estimator.layers), layout.partitions)
        chosen = rng.choice(len(balances), min(len(balances), 6), replace=False)
        for balance in [*(balances[n] for n in chosen), *search._balances(layout)]:
            assert endless <= search.estimator.step_s(layout, balance)[0] * (1 + 1e-12)


def small_machine(devices: int, memory_bytes: int) -> Machine:
    """A machine with so many devices per node, slow enough that everything counts."""
    return Machine(
        name="toy",
        devices_per_node=devices,
        device="toy device",
        memory_bytes=memory_bytes,
        host_bytes=2**40,
        cores=4,
        flops={"float32": 1e11, "float64": 5e10, "bfloat16": 4e11},
        memory_bandwidth=1e10,
        link_bandwidth=2e9,
        host_bandwidth=1e9,
        network_bandwidth=1e9,
        maths_efficiency=0.5,
        memory_efficiency=0.8,
    )


def small_question(seed: int) -> Question:
    """A question whose every layout and balance can be tried."""
    rng = np.random.default_rng(seed)
    options = UNetOptions(
        poolings=int(rng.integers(1, 3)),
        convolutions=1,
        base=int(rng.choice([2, 4, 6])),
        bands=int(rng.integers(1, 5)),
        classes=int(rng.integers(1, 4)),
        norm=str(rng.choice(["none", "instance"])),  # type: ignore[arg-type]
        norm_scope="tile" if seed % 2 else "image",
        padding=str(rng.choice(["same", "same", "valid"])),  # type: ignore[arg-type]
    )
    height, width = (int(size) for size in rng.integers(40, 130, 2))
    precisions = ["float32", "float64", "bfloat16"]
    return Question(
        options=options,
        epsilon_px=int(rng.integers(2, 12)),
        image=(height, width),
        machine=small_machine(int(rng.integers(1, 5)), int(2 ** rng.uniform(16.5, 19.5))),
        nodes=int(rng.integers(1, 3)),
        num_images=7,
        batch_size=int(rng.integers(1, 4)),
        precision=str(rng.choice(precisions)),
        optimizer=str(rng.choice(["adamw", "sgd"])),
        halo="exact" if options.padding == "valid" else str(rng.choice(["exact", "epsilon"])),
        reserve=float(rng.uniform(0, 0.2)),
    )
