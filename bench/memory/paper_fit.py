"""Which of the paper's models fit on 1, 2 and 6 devices of 16 GiB, at which tile and mode?

10 000 × 10 000 × 4 px in 8 × 8 tiles on Summit's nodes, float32, AdamW, a tenth of the memory kept
free. Overlap with the paper's ε and with the exact halo, and exchange, where 64 ranks hold a tile
each. The best plan, or what the leanest one needs. Then the paper's largest tile for its largest
model, 1434 px, on one node. Bytes are those of `planning.memory`, which
`bench/memory/memory.py` holds against real runs. --quick leaves out medium-1 and the exact halo.
"""

from dataclasses import replace
from typing import Any

from bench.report import Found, at_most
from tilenet.errors import TilenetError
from tilenet.geometry.halo import epsilon_px
from tilenet.geometry.unet import PAPER_LEVELS, PRESETS
from tilenet.planning.advise import why_nothing_fits
from tilenet.planning.machines import machine
from tilenet.planning.plan import Plan, Question
from tilenet.planning.search import Search

GIB = 2**30
IMAGE = (10_000, 10_000)


def question(preset: str, devices: int, mode: str, halo: str) -> Question:
    """One node whose ranks have so many devices each; with exchange 64 such ranks."""
    options = PRESETS[preset]
    epsilon = epsilon_px(PAPER_LEVELS[preset], options.convolutions, options.kernel)
    one = Question(options, epsilon, IMAGE, machine("summit"), halo=halo, partitions=devices)
    if mode == "overlap":
        return replace(one, grid=(8, 8))
    return replace(
        one,
        nodes=64,
        machine=replace(one.machine, devices_per_node=devices),
        halo_mode="exchange",
    )


def described(plan: Plan) -> dict[str, Any]:
    return {
        "fits": True,
        "read_px": plan.tile_read_px[0],
        "micro_batches": plan.layout.micro_batches,
        "checkpointing": plan.layout.checkpointing,
        "gib": plan.device_bytes / GIB,
        "balance": list(plan.balance),
        "bubble": plan.bubble,
        "work_ratio": plan.work_ratio,
        "step_s": plan.step_s,
    }


def outcome(asked: Question) -> dict[str, Any]:
    search = Search(asked)
    try:
        plans = search.best(1)
    except TilenetError as error:
        return {"fits": False, "reason": str(error)}
    if not plans:
        return {"fits": False, "reason": why_nothing_fits(search)}
    return described(plans[0])


def bench(quick: bool) -> Found:
    """The best plan of each model, or what it lacks."""
    modes = [("overlap", "epsilon"), ("overlap", "exact"), ("exchange", "exact")]
    if quick:
        modes.remove(("overlap", "exact"))
    figures: dict[str, Any] = {"limit_gib": 0.9 * machine("summit").memory_bytes / GIB}
    most = 0.0
    for preset in PRESETS:
        if quick and preset == "medium-1":
            continue
        for mode, halo in modes:
            for devices in (1, 2, 6):
                found = outcome(question(preset, devices, mode, halo))
                name = f"{preset}, {mode} {halo if mode == 'overlap' else ''}".strip()
                figures[f"{name}, {devices} devices"] = found
                most = max(most, found.get("gib", 0.0))
    large = replace(question("large", 6, "overlap", "epsilon"), grid=None, tile_px=1434 - 2 * 380)
    figures["large, tiles of 1434 px, one node"] = outcome(large)
    fullest = "GiB of the fullest plan that is said to fit"
    return figures, [at_most(fullest, most, figures["limit_gib"])]
