"""What the launcher gave each rank: a line per kind of node, so that a wrong launch is seen."""

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from tilenet.errors import AgreedError
from tilenet.parallel.health.progress import say
from tilenet.parallel.ranks.comm import agreed, threads_may_call
from tilenet.parallel.ranks.devices import NodePlace, choose_devices, node_place
from tilenet.parallel.ranks.tf32 import say_where_no_tf32, tf32_if_asked

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["RankLayout", "RunDevices", "layout_lines", "oversubscribed", "say_layout"]

MOST_LINES = 8  # of a job whose nodes all differ
MOST_RANGES = 4  # of a node whose ranks are dealt out in turn


@dataclass(frozen=True)
class RankLayout:
    """What one rank has.

    Attributes:
        node: The same for ranks of one node.
        host: The node's name.
        rank: The rank's number in the job.
        cores: Numbers of the cores that it may run on.
        threads: Threads that torch computes with.
        devices: One per partition: `cpu`, or the GPU's name.
        seen: Names of the GPUs that it sees.
    """

    node: int
    host: str
    rank: int
    cores: frozenset[int]
    threads: int
    devices: tuple[str, ...]
    seen: tuple[str, ...] = ()


def layout_lines(ranks: Sequence[RankLayout]) -> list[str]:
    """A line per node; one for neighbours that are alike."""
    described = [(_has(node), node[0].host, [rank.rank for rank in node]) for node in _nodes(ranks)]
    lines = []
    for what, alike in groupby(described, key=lambda node: (node[0], len(node[2]))):
        group = list(alike)
        hosts = [host for _, host, _ in group]
        numbers = sorted(number for _, _, there in group for number in there)
        each = ""
        name = f"node {hosts[0]}"
        if len(group) > 1:
            name = f"{len(group)} nodes {hosts[0]}–{hosts[-1]}"
            each = f", {what[1]} each"
        plural = "s" if len(numbers) > 1 else ""
        lines.append(f"{name}: rank{plural} {_ranges(numbers)}{each}; {what[0]}")
    if len(lines) > MOST_LINES:
        left = len(lines) - MOST_LINES + 1
        lines[MOST_LINES - 1 :] = [f"and {left} more lines for nodes that differ again"]
    return lines


def oversubscribed(ranks: Sequence[RankLayout]) -> str:
    """A sentence if some node has more threads than cores for them; else empty."""
    wrong = []
    for node in _nodes(ranks):
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


def _nodes(ranks: Sequence[RankLayout]) -> list[list[RankLayout]]:
    """The ranks by node, in order of their first."""
    nodes: dict[int, list[RankLayout]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        nodes.setdefault(rank.node, []).append(rank)
    return list(nodes.values())


def _cores(node: Sequence[RankLayout]) -> frozenset[int]:
    return frozenset().union(*(rank.cores for rank in node))


def _has(node: Sequence[RankLayout]) -> str:
    """What each rank of a node has, and what they have together."""
    parts = [
        _count((len(rank.cores) for rank in node), "core"),
        _count((rank.threads for rank in node), "thread"),
        _count((len(rank.devices) for rank in node), "partition"),
    ]
    used = {device for rank in node for device in rank.devices} - {"cpu"}
    seen = {name for rank in node for name in rank.seen} | used
    together = [_count([len(_cores(node))], "core")]
    if used:
        parts[-1] += f" on {_count((len(set(rank.devices)) for rank in node), 'GPU')}"
        together.append(f"{len(used)} of {_count([len(seen)], 'GPU')}")
    else:
        parts[-1] += " on the CPU"
    return f"a rank has {', '.join(parts)}; the node uses {', '.join(together)}"


def _count(numbers: Iterable[int], noun: str) -> str:
    found = sorted(set(numbers))
    plural = "" if found == [1] else "s"
    return (
        f"{'–'.join(str(number) for number in dict.fromkeys((found[0], found[-1])))} {noun}{plural}"
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers in short: `0–3, 8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = ["–".join(str(end) for end in dict.fromkeys(run)) for run in runs[:MOST_RANGES]]
    return ", ".join(shown + ["…"] * (len(runs) > MOST_RANGES))


def say_layout(
    comm: "MPI.Intracomm", place: NodePlace, devices: Sequence[torch.device]
) -> list[str]:
    """Have rank 0 say what all ranks have, and return these lines there. Collective."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    leader = node.bcast(comm.rank)
    node.Free()
    seen = place.shown[place.rank] if place.shown else ()
    names = tuple(
        "cpu" if device.type == "cpu" else (seen[device.index or 0] if seen else str(device))
        for device in devices
    )
    found = comm.gather(
        RankLayout(
            leader,
            MPI.Get_processor_name(),
            comm.rank,
            frozenset(os.sched_getaffinity(0)),
            torch.get_num_threads(),
            names,
            seen,
        )
    )
    if found is None:
        return []
    lines = layout_lines(found)
    for line in lines:
        say(line)
    if warning := oversubscribed(found):
        say(warning)
    return lines


@dataclass(frozen=True)
class RunDevices:
    """The devices of a rank in a run.

    Attributes:
        partitions: One per partition.
        place: Where the rank stands on its node.
        layout: What all ranks have, in lines; on rank 0.
    """

    partitions: tuple[torch.device, ...]
    place: NodePlace
    layout: list[str]

    @classmethod
    def choose(
        cls, asked: str | list[str], num_partitions: int, comm: "MPI.Intracomm"
    ) -> "RunDevices":
        """Choose the devices of each rank, and have rank 0 say them. Collective.

        Raises:
            AgreedError: See `choose_devices`.
        """
        place = node_place(comm, asked)
        with agreed(comm):
            partitions = choose_devices(asked, place, num_partitions)
        return cls(partitions, place, say_layout(comm, place, partitions))

    def check_threads(self, comm: "MPI.Intracomm") -> None:
        """Refuse layers that call MPI from threads which it does not take. Collective.

        Each partition has a thread, and autograd computes backward in one per GPU.

        Raises:
            AgreedError: It does not.
        """
        count, kind = len(self.partitions), self.partitions[0].type
        several = any(comm.allgather(count > 1 or kind != "cpu"))
        if comm.size > 1 and several and not threads_may_call(comm):
            raise AgreedError(
                f"layers that reach over ranks call MPI from several threads (partitions: {count}, "
                f"on {kind}; MPI grants less than MPI_THREAD_MULTIPLE); use an MPI that grants it, "
                "without MPI4PY_RC_THREAD_LEVEL, or one partition per rank on CPUs"
            )

    def compute_in(self, precision: str, stack: ExitStack, comm: "MPI.Intracomm") -> None:
        """Until the stack ends, with TF32 where `precision` is `tf32`. Collective."""
        stack.enter_context(tf32_if_asked(precision))
        say_where_no_tf32(precision, self.partitions, comm)
