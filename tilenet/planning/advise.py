"""When nothing fits: the smallest changes that would make it fit, each tried.

What square grids of tiles cost: the paper's question of how finely to cut.

A plan made again for another number of nodes, so that a run can go on with those that are left.

Tiles, halo, batch and precision stay: so does a result that depends on tiles, as with
`halo: epsilon`.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any, get_args

from tilenet.errors import TilenetError
from tilenet.model.choices import Checkpointing
from tilenet.planning.estimate import Estimator
from tilenet.planning.machines import PRECISIONS, checked_machine
from tilenet.planning.memory.partition import OPTIMIZER_STATES
from tilenet.planning.plan import Layout, Plan, Question, read_plan
from tilenet.planning.search import Search

__all__ = ["question_again", "sweep", "why_nothing_fits"]

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
    if asked.precision in ("float32", "tf32", "float64"):
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


COUNTS = range(4, 17)  # tiles along each side


def sweep(question: Question) -> list[dict[str, Any]]:
    """What square grids cost: exact and formula work ratios, bytes, and time where they fit.

    Raises:
        TilenetError: The question contradicts itself, or leaves no grid to choose.
    """
    if question.halo_mode == "exchange":
        raise TilenetError(
            "grids are compared for tiles that overlap (halo_mode: exchange, where each rank holds "
            "one tile); leave --sweep out, or set --halo-mode overlap"
        )
    rows: list[dict[str, Any]] = []
    for count in COUNTS:
        search = Search(replace(question, grid=(count, count), tile_px=None))
        try:
            tiling = search.estimator.tiling((count, count))
        except TilenetError:
            if rows:
                break  # finer grids are impossible too
            raise
        row: dict[str, Any] = {
            "grid": count,
            "tile_read_px": max(tiling.rows[0].read, tiling.cols[0].read),
            "work_ratio": tiling.work_ratio,
        }
        if question.epsilon_px:
            row["formula_ratio"] = 1 + 4 * count * question.epsilon_px / max(question.image)
        rows.append(row | _cost(search))
    return rows


def _cost(search: Search) -> dict[str, Any]:
    """Cost of one grid."""
    try:
        best = search.best(1)
    except TilenetError as error:  # fewer tiles than the micro-batches that were asked for
        return {"fits": False, "reason": str(error)}
    if best:
        took = {"layout": str(best[0].layout), "step_s": best[0].step_s}
        return {"device_bytes": best[0].device_bytes, "fits": True} | took
    least = search.leanest()
    return {"fits": False} | ({"device_bytes": least.device_bytes} if least else {})


# Values that a plan's question can have
ONE_OF = {
    "precision": PRECISIONS,
    "optimizer": tuple(OPTIMIZER_STATES),
    "halo_mode": ("overlap", "exchange"),
    "swap": ("off", "auto", "all"),
}


def question_again(path: Path, nodes: int) -> Question:
    """What to ask so that the answer is the plan in `path`, but for a number of nodes.

    All that the plan chose is fixed; only the ranks are laid out again. With `halo_mode: exchange`,
    where each rank holds one tile, the tiles follow from the ranks, which changes no result; how
    these go through the pipeline is then chosen again.

    Raises:
        TilenetError: It is no plan, or its question is incomplete.
    """
    if nodes < 1:
        raise TilenetError(f"nodes must be at least 1 (nodes: {nodes})")
    planned = read_plan(path)
    entry = json.loads(path.read_bytes().decode("utf-8"))
    keys, asked = planned.keys, entry["asked"]
    try:
        table = dict(asked["machine"])
        question = Question(
            options=planned.options,
            epsilon_px=_whole(asked["epsilon_px"], 0),
            image=planned.image,
            machine=checked_machine(str(table.pop("name")), table),
            nodes=nodes,
            num_images=_whole(asked["num_images"]),
            batch_size=_whole(asked["batch_size"]),
            halo=asked["halo"] if isinstance(asked["halo"], str) else _whole(asked["halo"], 0),
            partitions=len(keys["balance"]),
            reserve=float(asked["reserve"]),
            **{name: _one_of(asked[name], choices) for name, choices in ONE_OF.items()},
        )
        if question.halo_mode == "exchange":
            return question
        grid = _whole(keys["tiles"]["rows"]), _whole(keys["tiles"]["columns"])
        # Of fewer ranks the fullest can have fewer tiles: 10 are 2 × 5, 11 only 1 × 11.
        tiles = Estimator(question).tiles_per_rank(grid, len(keys["balance"]))
        return replace(
            question,
            grid=grid,
            balance=tuple(keys["balance"]),
            micro_batches=min(_whole(keys["micro_batches"]), tiles),
            checkpointing=_one_of(keys["checkpointing"], get_args(Checkpointing)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TilenetError(
            f"{path} must say what was asked for ({type(error).__name__}: {error}); write it again "
            "with tilenet plan -o"
        ) from error


def _whole(value: Any, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r} is no whole number from {least} on")
    return value


def _one_of(value: Any, choices: tuple[str, ...]) -> Any:
    if value not in choices:
        raise ValueError(f"{value!r} is none of {', '.join(choices)}")
    return value
