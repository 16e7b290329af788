"""Nodes, cores and devices of all ranks: a line per kind of node shows a wrong launch."""

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby

import torch

from tilenet.errors import AgreedError
from tilenet.mpi import Intracomm
from tilenet.parallel.health.progress import say
from tilenet.parallel.ranks.comm import agreed, threads_may_call
from tilenet.parallel.ranks.devices import NodePlace, choose_devices, find_node_place
from tilenet.parallel.ranks.node import ranks_of_node
from tilenet.parallel.ranks.tf32 import say_where_no_tf32, tf32_if_asked

MOST_LINES = 8  # of a job with nodes that all differ
MOST_RANGES = 4  # of the ranks of a node, where the launcher deals them out in turn


@dataclass(frozen=True)
class RankLayout:
    """Node, cores and devices of one rank.

    Attributes:
        node: A number that ranks of one node share.
        host: Name of the node.
        cores: Numbers of the cores that the rank may run on.
        threads: Threads that torch computes with.
        devices: One device per partition: `cpu`, or the GPU's name.
        gpus: Names of the GPUs that the rank sees.
    """

    node: int
    host: str
    rank: int
    cores: frozenset[int]
    threads: int
    devices: tuple[str, ...]
    gpus: tuple[str, ...] = ()


def describe_layout(ranks: Sequence[RankLayout]) -> list[str]:
    """A line per node; one for neighbours that are alike."""
    lines = []
    alike = groupby(_group_by_node(ranks), key=lambda node: (_describe_node(node), len(node)))
    for (description, size), group in alike:
        nodes = list(group)
        numbers = sorted(rank.rank for node in nodes for rank in node)
        name, each = f"node {nodes[0][0].host}", ""
        if len(nodes) > 1:
            name = f"{len(nodes)} nodes {nodes[0][0].host}–{nodes[-1][0].host}"
            each = f", {size} each"
        plural = "s" if len(numbers) > 1 else ""
        lines.append(f"{name}: rank{plural} {_shorten(numbers)}{each}; {description}")
    if len(lines) > MOST_LINES:
        left = len(lines) - MOST_LINES + 1
        lines[MOST_LINES - 1 :] = [f"and {left} more lines for nodes that differ again"]
    return lines


def warn_of_threads(ranks: Sequence[RankLayout]) -> str:
    """A sentence if some node has more threads than cores for them; else empty."""
    wrong = []
    for node in _group_by_node(ranks):
        threads, cores = [rank.threads for rank in node], len(_cores(node))
        if sum(threads) > cores:
            wrong.append((node[0].host, threads, cores))
    if not wrong:
        return ""
    host, threads, cores = wrong[0]
    fewer = max(1, cores // len(threads))
    more = f" and {len(wrong) - 1} more" * (len(wrong) > 1)
    return (
        f"more threads than cores, which wait for each other (node {host}{more}: {len(threads)} "
        f"ranks with {sum(threads)} threads on {cores} cores); "
        + f"set OMP_NUM_THREADS to {fewer}, " * (fewer < max(threads))  # it may be that already
        + "start fewer ranks per node, or give each more cores (srun -c, jsrun -c and -b)"
    )


def _group_by_node(ranks: Sequence[RankLayout]) -> list[list[RankLayout]]:
    """The ranks of each node, in order of its lowest."""
    nodes: dict[int, list[RankLayout]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        nodes.setdefault(rank.node, []).append(rank)
    return list(nodes.values())


def _cores(node: Sequence[RankLayout]) -> frozenset[int]:
    return frozenset().union(*(rank.cores for rank in node))


def _describe_node(node: Sequence[RankLayout]) -> str:
    """Describe the cores and devices of each rank of a node, and of all of them together."""
    parts = [
        _count((len(rank.cores) for rank in node), "core"),
        _count((rank.threads for rank in node), "thread"),
        _count((len(rank.devices) for rank in node), "partition"),
    ]
    used = {device for rank in node for device in rank.devices} - {"cpu"}
    visible = {name for rank in node for name in rank.gpus} | used
    together = [_count([len(_cores(node))], "core")]
    if used:
        parts[-1] += f" on {_count((len(set(rank.devices)) for rank in node), 'GPU')}"
        together.append(f"{len(used)} of {_count([len(visible)], 'GPU')}")
    else:
        parts[-1] += " on the CPU"
    return f"a rank has {', '.join(parts)}; the node uses {', '.join(together)}"


def _count(numbers: Iterable[int], noun: str) -> str:
    """The noun with its numbers: `7–8 cores`."""
    distinct = sorted(set(numbers))
    if len(distinct) == 1:
        return f"{distinct[0]} {noun}{'' if distinct == [1] else 's'}"
    return f"{distinct[0]}–{distinct[-1]} {noun}s"


def _shorten(numbers: Sequence[int]) -> str:
    """Sorted numbers in short: `0–3, 8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = ["–".join(str(end) for end in dict.fromkeys(run)) for run in runs[:MOST_RANGES]]
    return ", ".join(texts + ["…"] * (len(runs) > MOST_RANGES))


def say_layout(comm: Intracomm, place: NodePlace, devices: Sequence[torch.device]) -> list[str]:
    """Have rank 0 print the layout of all ranks, and return its lines there. Collective."""
    from mpi4py import MPI

    node = ranks_of_node(comm)
    lowest = node.bcast(comm.rank)
    node.Free()
    gpus = place.visible[place.rank] if place.visible else ()
    names = tuple(
        "cpu" if device.type == "cpu" else (gpus[device.index or 0] if gpus else str(device))
        for device in devices
    )
    ranks = comm.gather(
        RankLayout(
            lowest,
            MPI.Get_processor_name(),
            comm.rank,
            frozenset(os.sched_getaffinity(0)),
            torch.get_num_threads(),
            names,
            gpus,
        )
    )
    if ranks is None:
        return []
    lines = describe_layout(ranks)
    for line in lines:
        say(line)
    if warning := warn_of_threads(ranks):
        say(warning)
    return lines


@dataclass(frozen=True)
class RunDevices:
    """The devices of a rank in a run.

    Attributes:
        partitions: Devices of the partitions.
        layout: Lines that describe the layout of all ranks; empty on all but rank 0.
    """

    partitions: tuple[torch.device, ...]
    place: NodePlace
    layout: list[str]

    @classmethod
    def choose(cls, device: str | list[str], num_partitions: int, comm: Intracomm) -> "RunDevices":
        """Choose the devices of each rank, and have rank 0 print the layout. Collective.

        Raises:
            AgreedError: See `choose_devices`.
        """
        place = find_node_place(comm, device)
        with agreed(comm):
            partitions = choose_devices(device, place, num_partitions)
        return cls(partitions, place, say_layout(comm, place, partitions))

    def check_threads(self, comm: Intracomm) -> None:
        """Refuse layers that call MPI from several threads where MPI forbids it. Collective.

        Each partition has a thread, and autograd computes backward in one per GPU.

        Raises:
            AgreedError: MPI grants less than MPI_THREAD_MULTIPLE.
        """
        count, kind = len(self.partitions), self.partitions[0].type
        several = any(comm.allgather(count > 1 or kind != "cpu"))
        if comm.size > 1 and several and not threads_may_call(comm):
            raise AgreedError(
                f"layers that reach over ranks call MPI from several threads (partitions: {count}, "
                f"on {kind}; MPI grants less than MPI_THREAD_MULTIPLE); use an MPI that grants it, "
                "without MPI4PY_RC_THREAD_LEVEL, or one partition per rank on CPUs"
            )

    def compute_in(self, precision: str, stack: ExitStack, comm: Intracomm) -> None:
        """Compute with TF32 until `stack` closes, if `precision` is `tf32`. Collective."""
        stack.enter_context(tf32_if_asked(precision))
        say_where_no_tf32(precision, self.partitions, comm)
