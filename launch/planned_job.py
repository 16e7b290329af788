"""The part of `plan.json` that starting a job takes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilenet.errors import TilenetError
from tilenet.planning.plan import read_plan

__all__ = ["PlannedJob", "read_job"]

MESH = ("replicas", "rows", "columns")


@dataclass(frozen=True)
class PlannedJob:
    """A job as it was planned.

    Attributes:
        mesh: Replicas, rows and columns of ranks.
        partitions: Devices per rank.
        ranks_per_node: Most ranks that share a node, on the machine that was planned for.
        machine: Name of that machine.
        device_bytes: Predicted peak of the fullest device.
    """

    mesh: tuple[int, int, int]
    partitions: int
    ranks_per_node: int
    machine: str
    device_bytes: int

    @property
    def num_ranks(self) -> int:
        """MPI ranks of the job."""
        return self.mesh[0] * self.mesh[1] * self.mesh[2]


def read_job(path: Path) -> PlannedJob:
    """Read a plan that `tilenet plan -o` wrote.

    Raises:
        TilenetError: It is no plan, or a number in it is not one above 0.
    """
    keys = read_plan(path).keys  # says in a sentence why it is no plan
    entry = json.loads(path.read_bytes().decode("utf-8"))
    try:
        replicas, rows, columns = (_count(keys["mesh"][axis]) for axis in MESH)
        answer = entry["answer"]
        return PlannedJob(
            mesh=(replicas, rows, columns),
            partitions=_count(keys["partitions"]),
            ranks_per_node=_count(answer["ranks_per_node"]),
            machine=str(entry["asked"]["machine"]["name"]),
            device_bytes=_count(answer["device_bytes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TilenetError(
            f"{path} must say how many ranks there are and where (mesh, partitions, "
            f"ranks_per_node: {error}); write it again with tilenet plan -o"
        ) from error


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is no number of something")
    return value
