"""The part of `plan.json` that starting a job takes."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

from tilenet.planning.plan import read_plan


@dataclass(frozen=True)
class PlannedJob:
    """A job as it was planned.

    Attributes:
        num_ranks: MPI ranks of the job.
        partitions: Devices per rank.
        ranks_per_node: Most ranks that share a node, on the machine that was planned for.
        machine: Name of that machine.
        device_bytes: Predicted peak of the fullest device.
        host_bytes: Predicted peak of a rank's share of its node's memory.
    """

    num_ranks: int
    partitions: int
    ranks_per_node: int
    machine: str
    device_bytes: int
    host_bytes: int = 0


def read_job(path: Path) -> PlannedJob:
    """Read a plan that `tilenet plan -o` wrote.

    Raises:
        TilenetError: It is no plan.
    """
    plan = read_plan(path)
    return PlannedJob(
        num_ranks=prod(plan.mesh.values()),
        partitions=len(plan.balance),
        ranks_per_node=plan.ranks_per_node,
        machine=plan.question.machine.name,
        device_bytes=plan.device_bytes,
        host_bytes=plan.host_bytes // plan.ranks_per_node,
    )
