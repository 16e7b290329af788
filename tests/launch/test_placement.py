"""Where a plan's ranks go, what does not fit, and how plans are read."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from launch.layout import explain
from launch.placement import place
from launch.planned_job import PlannedJob, read_job
from tilenet.__main__ import main as tilenet
from tilenet.errors import TilenetError
from tilenet.planning.machines.read import machine


def job(ranks: int, partitions: int = 1, **other: Any) -> PlannedJob:
    """A job that was planned elsewhere, so that the machine decides."""
    wanted = {"ranks_per_node": 1, "machine": "elsewhere", "device_bytes": 2**30} | other
    return PlannedJob(num_ranks=ranks, partitions=partitions, **wanted)


# machine, ranks, partitions, --nodes; nodes, ranks per node, on the last, cores, devices per node
FITS = [
    ("summit", 4, 6, None, (4, 1, 1, 42, 6)),
    ("summit", 6, 3, None, (3, 2, 2, 21, 6)),
    ("summit", 3, 1, None, (1, 3, 3, 7, 3)),
    ("summit", 64, 1, None, (11, 6, 4, 7, 6)),  # a replica that straddles nodes
    ("summit", 64, 1, 16, (16, 4, 4, 7, 4)),
    ("summit", 64, 1, 64, (64, 1, 1, 7, 1)),
    ("summit", 7, 3, None, (4, 2, 1, 21, 6)),
    ("summit", 4, 4, None, (4, 1, 1, 28, 4)),
    ("frontier", 20, 2, None, (5, 4, 4, 14, 8)),
    ("frontier", 9, 1, None, (2, 8, 1, 7, 8)),
    ("perlmutter", 64, 1, None, (16, 4, 4, 16, 4)),
    ("polaris", 5, 2, None, (3, 2, 1, 16, 4)),
    ("pbs", 10, 1, 4, (4, 3, 1, 16, 3)),
    ("workstation", 1, 2, 1, (1, 1, 1, 32, 2)),
]


@pytest.mark.parametrize(("name", "ranks", "partitions", "nodes", "wanted"), FITS)
def test_ranks_fill_nodes(
    name: str, ranks: int, partitions: int, nodes: int | None, wanted: tuple[int, ...]
) -> None:
    placed = place(job(ranks, partitions), machine(name), nodes)
    found = placed.nodes, placed.ranks_per_node, placed.last_node_ranks, placed.cores_per_rank
    assert (*found, placed.devices_per_node) == wanted
    assert (placed.ranks, placed.partitions) == (ranks, partitions)


def test_a_rank_keeps_to_the_cores_and_devices_of_its_number() -> None:
    placed = place(job(6, 2), machine("summit"))
    assert [(b.local_rank, b.cores[0], b.cores[-1], b.devices) for b in placed.bindings] == [
        (0, 0, 13, (0, 1)),
        (1, 14, 27, (2, 3)),
        (2, 28, 41, (4, 5)),
    ]


# machine, ranks, partitions, --nodes, what is said
REFUSED = [
    ("summit", 4, 7, None, r"of one node \(partitions: 7, .*summit: 6\); plan with at most 6"),
    ("summit", 64, 1, 10, r"\(ranks: 64, at most 6 per node, nodes: 10\); give --nodes 11"),
    ("summit", 10, 1, 6, r"nodes: 6\); give --nodes 5"),
    ("summit", 4, 1, 5, r"nodes: 5\); give --nodes 4"),
    ("summit", 4, 1, 0, "must fill the nodes"),
    ("summit", 4, 1, -1, "must fill the nodes"),
    ("summit", 64, 2, None, r"jsrun fills.*3 per node, partitions: 2\); give --nodes 32, with 2"),
    ("summit", 10, 1, 3, r"jsrun fills .*4 per node.*; give --nodes 2, with 5 on each"),
    ("slurm", 5, 1, 2, r"srun fills .*3 per node.*; give --nodes 5, with 1 on each"),
    ("tuolumne", 5, 1, None, r"flux fills all nodes alike .*; give --nodes 5, with 1 on each"),
    ("aurora", 4, 2, None, r"streams of CUDA or ROCm \(partitions: 2, .*aurora: Intel"),
    ("workstation", 3, 1, None, "mpiexec starts the ranks of one node here"),
    ("local", 2, 1, None, "mpiexec starts the ranks of one node here"),
]


@pytest.mark.parametrize(("name", "ranks", "partitions", "nodes", "said"), REFUSED)
def test_what_does_not_fit_is_refused_in_a_sentence(
    name: str, ranks: int, partitions: int, nodes: int | None, said: str
) -> None:
    with pytest.raises(TilenetError, match=said):
        place(job(ranks, partitions), machine(name), nodes)


@pytest.mark.parametrize(("ranks", "partitions", "nodes"), [(64, 2, 32), (10, 1, 2), (64, 1, 11)])
def test_the_remedies_help(ranks: int, partitions: int, nodes: int) -> None:
    assert place(job(ranks, partitions), machine("summit"), nodes).nodes == nodes


def test_devices_too_small_for_the_plan_are_refused() -> None:
    big = job(2, device_bytes=40 * 2**30)
    with pytest.raises(TilenetError, match=r"40.00 GiB, NVIDIA V100 .* 16.00 GiB\); plan with"):
        place(big, machine("summit"))
    assert place(big, machine("frontier")).ranks == 2


def test_a_machine_without_a_core_per_device_is_refused() -> None:
    with pytest.raises(TilenetError, match="must have a core to drive it"):
        place(job(1), replace(machine("summit"), cores=5))


def test_the_planners_limit_counts_on_its_own_machine() -> None:
    planned = job(4, machine="summit", ranks_per_node=2)
    assert place(planned, machine("summit")).nodes == 2
    assert place(planned, machine("frontier")).nodes == 1
    more = job(8, machine="summit", ranks_per_node=12)
    with pytest.raises(
        TilenetError, match=r"\(planned: 8, devices of each: 1, per node of summit: 6"
    ):
        place(more, machine("summit"))
    assert place(replace(more, num_ranks=6), machine("summit")).nodes == 1


def test_the_layout_has_a_line_per_kind_of_node() -> None:
    assert explain(place(job(7, 3), machine("summit"))).splitlines() == [
        "4 nodes, 7 ranks (2 a node, 1 on the last), each with 3 devices and 21 cores",
        "  3 nodes: rank 0: cores 0-20, devices 0-2; rank 1: cores 21-41, devices 3-5",
        "  last node: rank 0: cores 0-20, devices 0-2",
    ]


# --- plan files


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan as `tilenet plan` writes it."""
    path = tmp_path / "plan.json"
    asked = ["--poolings", "2", "--base", "8", "--image", "600x400", "--partitions", "3"]
    where = ["--machine", "summit", "--nodes", "2", "--json", "-o", str(path)]
    assert tilenet(["plan", *asked, *where]) == 0
    return path


def test_a_plan_is_read(plan: Path) -> None:
    read = read_job(plan)
    answer = json.loads(plan.read_text())["answer"]
    assert read.num_ranks == prod(answer["mesh"])
    assert (read.partitions, read.ranks_per_node, read.machine) == (3, 2, "summit")
    assert read.device_bytes == answer["device_bytes"]


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("run", "mesh", None),
        ("run", "mesh", {"replicas": 0, "rows": 1, "columns": 1}),
        ("run", "mesh", {"replicas": True, "rows": 1, "columns": 1}),
        ("run", "mesh", {"rows": 1, "columns": 1}),
        ("run", "mesh", 4),
        ("answer", "ranks_per_node", "6"),
        ("answer", "device_bytes", None),
        ("asked", "machine", "summit"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(
    plan: Path, part: str, key: str, value: object
) -> None:
    entry = json.loads(plan.read_text())
    entry[part][key] = value
    plan.write_text(json.dumps(entry))
    with pytest.raises(TilenetError, match="must be a plan"):
        read_job(plan)


def test_what_is_no_plan_is_refused(plan: Path, tmp_path: Path) -> None:
    with pytest.raises(TilenetError, match="must be a readable file"):
        read_job(tmp_path / "none.json")
    plan.write_text('{"tilenet_plan": 1, "run": {"balance": [1], "partitions": 1}}')
    with pytest.raises(TilenetError, match="must be a plan"):
        read_job(plan)


def test_no_more_ranks_share_another_machines_node_than_its_memory_holds() -> None:
    facts = machine("perlmutter")
    job = PlannedJob(16, 1, 4, "jupiter", 1)
    assert place(job, facts).ranks_per_node == 4
    half = facts.rank_bytes // 2
    assert place(replace(job, host_bytes=half), facts).ranks_per_node == 2
    assert place(replace(job, host_bytes=half, machine="perlmutter"), facts).ranks_per_node == 4
    with pytest.raises(TilenetError, match="a node must hold what the plan predicts for a rank"):
        place(replace(job, host_bytes=2 * half + 2), facts)
