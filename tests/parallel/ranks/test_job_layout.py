"""What the launcher gave each rank, in words."""

import os

import pytest
import torch
from mpi4py import MPI

from tilenet.parallel.ranks import layout as job_layout
from tilenet.parallel.ranks.layout import (
    RankLayout,
    describe_layout,
    find_node_place,
    say_layout,
    warn_of_threads,
)


def on_cpus(node: int, ranks: range, cores: int, threads: int = 1) -> list[RankLayout]:
    """Ranks of a node that share its cores."""
    shared = frozenset(range(cores))
    return [RankLayout(node, f"n{node + 1}", rank, shared, threads, ("cpu",)) for rank in ranks]


def summit(node: int, first: int, ranks: int = 6, partitions: int = 1) -> list[RankLayout]:
    """Ranks of a Summit node, bound to their cores; all see its six GPUs."""
    gpus = tuple(f"{node}-{number}" for number in range(6))
    width = 42 // ranks
    return [
        RankLayout(
            node,
            f"h{node:02}",
            first + local,
            frozenset(range(local * width, (local + 1) * width)),
            width,
            gpus[local * partitions : (local + 1) * partitions],
            gpus,
        )
        for local in range(ranks)
    ]


@pytest.mark.parametrize(
    ("ranks", "lines"),
    [
        (
            on_cpus(0, range(1), 2),
            [
                "node n1: rank 0; a rank has 2 cores, 1 thread, 1 partition on the CPU; the node "
                "uses 2 cores"
            ],
        ),
        (
            [rank for node in range(4) for rank in summit(node, 6 * node)],
            [
                "4 nodes h00–h03: ranks 0–23, 6 each; a rank has 7 cores, 7 threads, 1 partition "
                "on 1 GPU; the node uses 42 cores, 6 of 6 GPUs"
            ],
        ),
        (
            summit(0, 0, ranks=2, partitions=2) + summit(1, 2, ranks=1, partitions=6),
            [
                "node h00: ranks 0–1; a rank has 21 cores, 21 threads, 2 partitions on 2 GPUs; the "
                "node uses 42 cores, 4 of 6 GPUs",
                "node h01: rank 2; a rank has 42 cores, 42 threads, 6 partitions on 6 GPUs; the "
                "node uses 42 cores, 6 of 6 GPUs",
            ],
        ),
        # dealt out in turn, given in any order
        (
            on_cpus(1, range(1, 12, 2), 8)[::-1] + on_cpus(0, range(0, 12, 2), 8),
            [
                "2 nodes n1–n2: ranks 0–11, 6 each; a rank has 8 cores, 1 thread, 1 partition on "
                "the CPU; the node uses 8 cores"
            ],
        ),
        (
            on_cpus(0, range(0, 12, 2), 8),
            [
                "node n1: ranks 0, 2, 4, 6, …; a rank has 8 cores, 1 thread, 1 partition on the "
                "CPU; the node uses 8 cores"
            ],
        ),
        # one rank too few on a node in the middle; and partitions that share a named GPU
        (
            on_cpus(0, range(2), 2) + on_cpus(1, range(2, 3), 2) + on_cpus(2, range(3, 5), 2),
            [
                f"node n{node}: rank{ranks}; a rank has 2 cores, 1 thread, 1 partition on the CPU; "
                "the node uses 2 cores"
                for node, ranks in ((1, "s 0–1"), (2, " 2"), (3, "s 3–4"))
            ],
        ),
        (
            [RankLayout(0, "n1", 0, frozenset({3}), 1, ("x", "x"), ("x", "y"))],
            [
                "node n1: rank 0; a rank has 1 core, 1 thread, 2 partitions on 1 GPU; the node "
                "uses 1 core, 1 of 2 GPUs"
            ],
        ),
        # all bound to one core: six ranks "with a core", and yet the node uses one
        (
            on_cpus(0, range(6), 1),
            [
                "node n1: ranks 0–5; a rank has 1 core, 1 thread, 1 partition on the CPU; the node "
                "uses 1 core"
            ],
        ),
    ],
)
def test_lines(ranks: list[RankLayout], lines: list[str]) -> None:
    assert describe_layout(ranks) == lines


def test_many_nodes_that_differ_are_few_lines() -> None:
    ranks = [rank for node in range(20) for rank in on_cpus(node, range(node, node + 1), node + 1)]
    lines = describe_layout(ranks)
    assert len(lines) == 8
    assert lines[-1] == "and 13 more lines for nodes that differ again"
    assert describe_layout(ranks[:8])[-1].startswith("node n8: rank 7;")


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (on_cpus(0, range(2), 2), ""),
        (summit(0, 0), ""),
        (
            on_cpus(0, range(3), 2),
            "(node n1: 3 ranks with 3 threads on 2 cores); start fewer ranks ",
        ),
        (
            on_cpus(0, range(2), 8, 8),
            "2 ranks with 16 threads on 8 cores); set OMP_NUM_THREADS to 4,",
        ),
        (
            on_cpus(0, range(1), 4) + on_cpus(1, range(1, 3), 1) + on_cpus(2, range(3, 5), 1),
            "(node n2 and 1 more: 2 ranks with 2 threads on 1 cores)",
        ),
        (
            on_cpus(0, range(1), 2) + on_cpus(0, range(1, 3), 2, 2),
            "3 ranks with 5 threads on 2 cores); set OMP_NUM_THREADS to 1, start fewer",
        ),
    ],
)
def test_more_threads_than_cores_are_said(ranks: list[RankLayout], said: str) -> None:
    found = warn_of_threads(ranks)
    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.ranks(1, 3)
def test_rank_0_says_what_all_have(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(job_layout, "say", said.append)
    say_layout(comm, find_node_place(comm), (torch.device("cpu"),) * 2)
    if comm.rank:
        assert said == []
        return
    cores = len(os.sched_getaffinity(0))
    ranks = "rank 0" if comm.size == 1 else f"ranks 0–{comm.size - 1}"
    assert said[0].startswith(f"node {MPI.Get_processor_name()}: {ranks}; a rank has {cores} core")
    assert "2 partitions on the CPU; the node uses" in said[0]
    assert len(said) == 1 + (comm.size * torch.get_num_threads() > cores)
