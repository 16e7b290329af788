"""Ask the planner again for another number of nodes, so that a run can go on there.

Tiles, halo, batch and precision stay: so does a result that depends on tiles, as with
`halo: epsilon`.
"""

from dataclasses import replace
from pathlib import Path

from tilenet.errors import TilenetError
from tilenet.planning.advise import ALL_OPEN
from tilenet.planning.estimate import Estimator
from tilenet.planning.plan import Question, read_plan


def replan(path: Path, nodes: int) -> Question:
    """Return the question that the plan in `path` answers, for another number of nodes.

    All that the plan chose is fixed; only the ranks are laid out again. Where each
    rank holds one tile, with `halo_mode: exchange` and `sweep`, the tiles follow from the ranks,
    which changes no result; how these go through the pipeline is then chosen again.

    Raises:
        TilenetError: It is no plan.
    """
    if nodes < 1:
        raise TilenetError(f"nodes must be at least 1 (nodes: {nodes})")
    plan = read_plan(path)
    fixed = {"nodes": nodes, "partitions": len(plan.balance)}
    question = replace(plan.question, **(ALL_OPEN | fixed))
    if question.halo_mode != "overlap":
        return question
    grid = plan.tiles["rows"], plan.tiles["columns"]
    # Of fewer ranks the fullest can have fewer tiles: 10 are 2 × 5, 11 only 1 × 11.
    most = Estimator(question).micro_batches(grid, len(plan.balance))
    return replace(
        question,
        grid=grid,
        balance=plan.balance,
        micro_batches=min(plan.micro_batches, most),
        checkpointing=plan.checkpointing,
    )
