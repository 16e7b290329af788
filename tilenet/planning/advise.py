"""Name changes that make a plan fit where nothing fits; each is tried."""

from dataclasses import replace
from math import ceil
from typing import Any

from tilenet.geometry.unet import UNetOptions
from tilenet.planning.compatibility import whole_image
from tilenet.planning.fitting import find_first, find_leanest
from tilenet.planning.plan import MODES, Question

GIB = 2**30
CHOICES = ("grid", "tile_px", "partitions", "balance", "micro_batches", "checkpointing")
ALL_OPEN: dict[str, Any] = dict.fromkeys(CHOICES)  # left to the planner


def why_nothing_fits(question: Question) -> str:
    """Say in one sentence how much the leanest layout needs, and which changes suffice."""
    leanest = find_leanest(question)
    needed = "a feature map has 2³¹ elements or more in every micro-batch"
    if leanest is not None:
        needed = (
            f"{_gib(leanest.device_bytes)} at least, with {leanest.layout} and balance "
            f"{list(leanest.balance)}"
        )
    remedies: dict[str, dict[str, Any]] = {
        "swap auto": {"swap": "auto"},
        "leave all choices to the planner": ALL_OPEN,
    }
    for mode in MODES:
        words = f"leave all choices to the planner, halo_mode {mode}"
        remedies[words] = {**ALL_OPEN, "halo_mode": mode}
    if whole_image(question.layers) and isinstance(question.options, UNetOptions):
        local = replace(question.options, norm_scope="tile")
        remedies["norm_scope tile (approximate)"] = {"options": local}
    remedies["precision bfloat16"] = {"precision": "bfloat16"}
    changes = {}
    for words, change in remedies.items():
        changed = replace(question, **change)
        plan = None if changed == question else find_first(changed)
        if plan is not None and plan.layout not in changes:
            changes[plan.layout] = f"{words}: {plan.layout} take {_gib(plan.device_bytes)}"
    remedy = "; or ".join(changes.values())
    if not changes and leanest is not None:
        # Rounded up, so that a device of the stated size suffices.
        tenths = ceil(leanest.device_bytes / (1 - question.reserve) / GIB * 10 + 0.01)
        remedy = f"take devices of at least {tenths / 10:.1f} GiB"
    return (
        f"a plan must fit its devices (needed: {needed}; there is: {_gib(question.limit_bytes)} "
        f"of {_gib(question.machine.memory_bytes)} on {question.machine.device}, "
        f"{question.reserve:.0%} kept free); {remedy or 'take a smaller network'}"
    )


def _gib(num_bytes: int) -> str:
    value = num_bytes / GIB
    return f"{value:.1f} GiB" if value >= 0.1 else f"{value:.1g} GiB"
