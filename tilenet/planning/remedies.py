"""When nothing fits: the smallest changes that would make it fit, each tried."""

from dataclasses import replace

from tilenet.errors import TilenetError
from tilenet.planning.layer_bytes import LARGEST_MAP, largest_map
from tilenet.planning.plan import Layout, Plan, Question
from tilenet.planning.search import Search

__all__ = ["why_nothing_fits"]

GIB = 2**30


def why_nothing_fits(search: Search) -> str:
    """One sentence: what the leanest layout needs, and what would do."""
    asked = search.question
    leanest = _leanest(search)
    needed = "a feature map has 2³¹ elements or more on every tile"
    if leanest is not None:
        needed = (
            f"{_gib(leanest.device_bytes)} at least, with {leanest.layout} and balance "
            f"{list(leanest.balance)}"
        )
    changes = [change for change in _changes(asked, leanest) if change]
    remedy = "; or ".join(changes) if changes else "take a smaller network"
    return (
        f"a plan must fit its devices (needed: {needed}; there is: {_gib(asked.limit_bytes)} of "
        f"{_gib(asked.machine.memory_bytes)} on {asked.machine.device}, {asked.reserve:.0%} kept "
        f"free); {remedy}"
    )


def _leanest(search: Search) -> Plan | None:
    """Of all layouts the one that needs least."""
    found: list[Plan] = []
    asked = search.question
    few = {
        Layout(one.grid, one.partitions, asked.micro_batches or 1, asked.checkpointing or "always")
        for one in search.layouts()
    }
    for layout in sorted(few, key=str):
        read_px = search.estimator.read_px(layout.grid)
        if largest_map(search.estimator.layers, *read_px)[1] < LARGEST_MAP:
            found.append(search.leanest(layout))
    return min(found, key=lambda plan: plan.device_bytes, default=None)


def _changes(asked: Question, leanest: Plan | None) -> list[str]:
    """What would make it fit, one change at a time."""
    free = {
        "checkpointing": replace(asked, checkpointing=None),
        "partitions": replace(asked, partitions=None, balance=None),
        "balance": replace(asked, balance=None),
        "micro-batches": replace(asked, micro_batches=None, mbpp=None),
        "tiles": replace(asked, grid=None, tile_px=None),
    }
    changes = []
    for name, question in free.items():
        if question == asked:
            continue
        plan = _first(question)
        if plan is not None:
            changes.append(f"choose other {name}: {plan.layout} take {_gib(plan.device_bytes)}")
    if changes:
        return changes
    everything = replace(
        asked,
        checkpointing=None,
        partitions=None,
        balance=None,
        micro_batches=None,
        mbpp=None,
        grid=None,
        tile_px=None,
    )
    plan = _first(everything) if everything != asked else None
    if plan is not None:
        return [f"leave all choices to the planner: {plan.layout} take {_gib(plan.device_bytes)}"]
    if asked.precision == "float32":
        plan = _first(replace(everything, precision="bfloat16"))
        if plan is not None:
            changes.append(f"precision bfloat16: {plan.layout} take {_gib(plan.device_bytes)}")
    if asked.optimizer == "adamw":
        plan = _first(replace(everything, optimizer="sgd"))
        if plan is not None:
            changes.append(f"optimizer sgd: {plan.layout} take {_gib(plan.device_bytes)}")
    if leanest is not None:
        whole = leanest.device_bytes / (1 - asked.reserve)
        changes.append(f"take devices of at least {_gib(int(whole))}, or more of them per rank")
    return changes


def _first(question: Question) -> Plan | None:
    try:
        return next(iter(Search(question).best(1)), None)
    except TilenetError:
        return None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
