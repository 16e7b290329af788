"""When nothing fits: changes that would make it fit, each tried.

A plan made again for another number of nodes, so that a run can go on with those that are left.

Tiles, halo, batch and precision stay: so does a result that depends on tiles, as with
`halo: epsilon`.
"""

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, get_args

from tilenet.errors import TilenetError
from tilenet.geometry.unet import UNetOptions
from tilenet.model.choices import Checkpointing
from tilenet.planning.compatibility import whole_image
from tilenet.planning.estimate import Estimator
from tilenet.planning.machines import PRECISIONS, checked_machine
from tilenet.planning.memory.states import OPTIMIZER_STATES
from tilenet.planning.plan import Plan, Question, read_plan
from tilenet.planning.search import Search

__all__ = ["ALL_OPEN", "first_plan", "question_again", "why_nothing_fits"]

GIB = 2**30
CHOICES = ("grid", "tile_px", "partitions", "balance", "micro_batches", "mbpp", "checkpointing")
ALL_OPEN: dict[str, Any] = dict.fromkeys(CHOICES)  # left to the planner


def why_nothing_fits(search: Search) -> str:
    """One sentence: what the leanest layout needs, and what would do."""
    asked = search.question
    leanest = search.leanest()
    needed = "a feature map has 2³¹ elements or more in every micro-batch"
    if leanest is not None:
        needed = (
            f"{_gib(leanest.device_bytes)} at least, with {leanest.layout} and balance "
            f"{list(leanest.balance)}"
        )
    remedies: dict[str, dict[str, Any]] = {
        "swap auto": {"swap": "auto"},
        "leave all choices to the planner": ALL_OPEN,
        "leave all choices to the planner, halo_mode overlap": {**ALL_OPEN, "halo_mode": "overlap"},
    }
    if whole_image(asked.layers):
        exchange = {**ALL_OPEN, "halo_mode": "exchange"}
        remedies["leave all choices to the planner, halo_mode exchange"] = exchange
        if isinstance(asked.options, UNetOptions):
            local = replace(asked.options, norm_scope="tile")
            remedies["norm_scope tile (approximate)"] = {"options": local}
    remedies["precision bfloat16"] = {"precision": "bfloat16"}
    changes = {}
    for words, change in remedies.items():
        question = replace(asked, **change)
        plan = None if question == asked else first_plan(question)
        if plan is not None and plan.layout not in changes:
            changes[plan.layout] = f"{words}: {plan.layout} take {_gib(plan.device_bytes)}"
    remedy = "; or ".join(changes.values())
    if not changes and leanest is not None:
        # Rounded up, so that a device of what is said does.
        tenths = ceil(leanest.device_bytes / (1 - asked.reserve) / GIB * 10 + 0.01)
        remedy = f"take devices of at least {tenths / 10:.1f} GiB"
    return (
        f"a plan must fit its devices (needed: {needed}; there is: {_gib(asked.limit_bytes)} of "
        f"{_gib(asked.machine.memory_bytes)} on {asked.machine.device}, {asked.reserve:.0%} kept "
        f"free); {remedy or 'take a smaller network'}"
    )


def first_plan(question: Question) -> Plan | None:
    """The fastest plan; None: nothing fits."""
    try:
        return next(iter(Search(question).best(1)), None)
    except TilenetError:  # a machine without that precision
        return None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


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
    keys, asked = planned.keys, planned.asked
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
        most = Estimator(question).micro_batches(grid, len(keys["balance"]))
        return replace(
            question,
            grid=grid,
            balance=tuple(keys["balance"]),
            micro_batches=min(_whole(keys["micro_batches"]), most),
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
