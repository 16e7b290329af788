"""Ask the planner again for another number of nodes, so that a run can go on there.

Tiles, halo, batch and precision stay: so does a result that depends on tiles, as with
`halo: epsilon`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from tilenet.choices import Checkpointing, Pipelining
from tilenet.errors import TilenetError
from tilenet.planning.estimate import Estimator
from tilenet.planning.machines.read import checked_machine
from tilenet.planning.machines.values import PRECISIONS
from tilenet.planning.memory.states import OPTIMIZER_STATES
from tilenet.planning.plan import MODES, Question, read_plan

__all__ = ["replan"]

# Values that a plan's question can have
CHOICES = {
    "precision": PRECISIONS,
    "optimizer": tuple(OPTIMIZER_STATES),
    "halo_mode": MODES,
    "swap": ("off", "auto", "all"),
    "pipeline": get_args(Pipelining),
}


def replan(path: Path, nodes: int) -> Question:
    """Return the question that the plan in `path` answers, for another number of nodes.

    All that the plan chose is fixed; only the ranks are laid out again. Where each
    rank holds one tile, with `halo_mode: exchange` and `sweep`, the tiles follow from the ranks,
    which changes no result; how these go through the pipeline is then chosen again.

    Raises:
        TilenetError: It is no plan, or its question is incomplete.
    """
    if nodes < 1:
        raise TilenetError(f"nodes must be at least 1 (nodes: {nodes})")
    planned = read_plan(path)
    keys, entry = planned.keys, planned.question
    try:
        table = dict(entry["machine"])
        question = Question(
            options=planned.options,
            epsilon_px=_whole(entry["epsilon_px"], 0),
            image=planned.image,
            machine=checked_machine(str(table.pop("name")), table),
            nodes=nodes,
            num_images=_whole(entry["num_images"]),
            batch_size=_whole(entry["batch_size"]),
            halo=entry["halo"] if isinstance(entry["halo"], str) else _whole(entry["halo"], 0),
            partitions=len(keys["balance"]),
            reserve=float(entry["reserve"]),
            **{name: _choice(entry[name], choices) for name, choices in CHOICES.items()},
        )
        if question.halo_mode != "overlap":
            return question
        grid = _whole(keys["tiles"]["rows"]), _whole(keys["tiles"]["columns"])
        # Of fewer ranks the fullest can have fewer tiles: 10 are 2 × 5, 11 only 1 × 11.
        most = Estimator(question).micro_batches(grid, len(keys["balance"]))
        return replace(
            question,
            grid=grid,
            balance=tuple(keys["balance"]),
            micro_batches=min(_whole(keys["micro_batches"]), most),
            checkpointing=_choice(keys["checkpointing"], get_args(Checkpointing)),
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


def _choice(value: Any, choices: tuple[str, ...]) -> Any:
    if value not in choices:
        raise ValueError(f"{value!r} is not one of {', '.join(choices)}")
    return value
