"""When nothing fits: the smallest changes that would make it fit, each tried."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from math import ceil

from tilenet.errors import TilenetError
from tilenet.planning.plan import Layout, Plan, Question
from tilenet.planning.search import Search

__all__ = ["why_nothing_fits"]

GIB = 2**30


def why_nothing_fits(search: Search) -> str:
    """One sentence: what the leanest layout needs, and what would do."""
    asked = search.question
    leanest = search.leanest()
    needed = "a feature map has 2³¹ elements or more on every tile"
    if leanest is not None:
        needed = (
            f"{_gib(leanest.device_bytes)} at least, with {leanest.layout} and balance "
            f"{list(leanest.balance)}"
        )
    changes = _changes(asked, leanest)
    remedy = "; or ".join(changes) if changes else "take a smaller network"
    return (
        f"a plan must fit its devices (needed: {needed}; there is: {_gib(asked.limit_bytes)} of "
        f"{_gib(asked.machine.memory_bytes)} on {asked.machine.device}, {asked.reserve:.0%} kept "
        f"free); {remedy}"
    )


def _changes(asked: Question, leanest: Plan | None) -> list[str]:
    """What would make it fit, one change at a time."""
    free = {
        "checkpointing": replace(asked, checkpointing=None),
        "balance": replace(asked, balance=None),
        "micro-batches": replace(asked, micro_batches=None, mbpp=None),
        "tiles": replace(asked, grid=None, tile_px=None),
        "partitions": replace(asked, partitions=None, balance=None),
    }
    changes: dict[Layout, str] = {}
    if asked.swap == "off":  # whatever else was fixed may stay
        plan = _first(replace(asked, swap="auto"))
        if plan is not None:
            changes[plan.layout] = f"swap auto: {_takes(plan)}"
    for name, question in free.items():
        plan = None if question == asked else _first(question)
        if plan is not None and plan.layout not in changes:
            changes[plan.layout] = f"choose other {name}: {_takes(plan)}"
    if changes:
        return list(changes.values())
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
    plan = None if everything == asked else _first(everything)
    if plan is not None:
        return [f"leave all choices to the planner: {_takes(plan)}"]
    found = []
    for change, question in _larger(everything):
        plan = _first(question)
        if plan is not None:
            found.append(f"{change}: {_takes(plan)}")
    if leanest is not None:
        # Rounded up, so that a device of what is said does.
        tenths = ceil(leanest.device_bytes / (1 - asked.reserve) / GIB * 10 + 0.01)
        found.append(f"take devices of at least {tenths / 10:.1f} GiB")
    return found


def _larger(asked: Question) -> Iterator[tuple[str, Question]]:
    """Changes of what was given: swapping, the machine, the precision, the optimizer."""
    if asked.swap == "off":
        yield "swap auto", replace(asked, swap="auto")
    if asked.halo_mode == "exchange":
        # More ranks hold less each; tiles that overlap can be as small without more nodes.
        nodes = (asked.nodes * factor for factor in (2, 4, 8, 16, 32, 64))
        fitting = (n for n in nodes if _first(replace(asked, nodes=n)) is not None)
        for count in islice(fitting, 1):
            yield f"take {count} nodes", replace(asked, nodes=count)
        yield "halo_mode overlap", replace(asked, halo_mode="overlap")
    if asked.precision in ("float32", "float64"):
        for precision in ("float32", "bfloat16", "float16"):
            if precision != asked.precision and precision in asked.machine.flops:
                yield f"precision {precision}", replace(asked, precision=precision)
    if asked.optimizer == "adamw":
        yield "optimizer sgd", replace(asked, optimizer="sgd")


def _takes(plan: Plan) -> str:
    return f"{plan.layout} take {_gib(plan.device_bytes)}"


def _first(question: Question) -> Plan | None:
    try:
        return next(iter(Search(question).best(1)), None)
    except TilenetError:
        return None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
