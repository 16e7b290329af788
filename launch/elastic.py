"""Jobs that go on with fewer nodes when some die: their plan and their options."""

import re
from argparse import ArgumentTypeError
from pathlib import Path

from tilenet.errors import TilenetError
from tilenet.planning.machines.machine import Machine

from .placement import Placement
from .planned_job import PlannedJob


def node_range(text: str) -> tuple[int, int | None]:
    """The fewest and the most nodes of `3-4`; of `4` the number of nodes, and None.

    Raises:
        ArgumentTypeError: It is neither.
    """
    match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ArgumentTypeError(f"expected a number of nodes, or a range such as 3-4, got {text!r}")
    return least, None if most == least else most


def job_of_least(path: Path, facts: Machine, least: int) -> PlannedJob:
    """The plan made again for the fewest nodes, with which a job must be able to go on.

    Raises:
        TilenetError: It is no plan, is of another machine, or does not fit so few nodes.
    """
    # They load torch, which takes longer than all that other jobs need.
    from tilenet.planning.advise import why_nothing_fits
    from tilenet.planning.fitting import find_fitting
    from tilenet.planning.replan import replan

    question = replan(path, least)
    if question.machine.name != facts.name:
        raise TilenetError(
            f"a plan that is made again for fewer nodes must be of the machine of the job (plan: "
            f"{question.machine.name}, job: {facts.name}); plan with --machine {facts.name}"
        )
    plans = find_fitting(question, alone=True)
    if not plans:
        raise TilenetError(f"{least} nodes: {why_nothing_fits(question)}")
    plan = plans[0]
    name, partitions = question.machine.name, plan.layout.partitions
    return PlannedJob(plan.num_ranks, partitions, plan.ranks_per_node, name, plan.device_bytes)


def check_range(placed: Placement, most: int) -> None:
    """Refuse a range of nodes that the batch system does not take.

    Raises:
        TilenetError: The machine's batch system or launcher is not Slurm's, or the range is empty.
    """
    facts = placed.machine.launch
    if (facts.scheduler, facts.launcher) != ("slurm", "srun"):
        raise TilenetError(
            f"only Slurm gives a job a range of nodes and leaves it those that live ("
            f"{placed.machine.name}: {facts.scheduler}, {facts.launcher}); give one number of "
            "--nodes"
        )
    if most <= placed.nodes or placed.straddles:
        raise TilenetError(
            f"all nodes of a range must be filled alike (at least: {placed.nodes}, at most: "
            f"{most}, ranks: {placed.ranks}); give more at most than at least"
        )


def without_nodes(line: list[str]) -> list[str]:
    """A command line of srun without its nodes and ranks, which each life of the job has again."""
    skip = {at + more for at, word in enumerate(line) if word in ("-N", "-n") for more in (0, 1)}
    return [word for at, word in enumerate(line) if at not in skip]
