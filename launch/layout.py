"""A placement as text, so that a wrong one is seen before the job waits in a queue."""

from .placement import Placement

__all__ = ["explain", "in_one_line"]


def in_one_line(placed: Placement, most_nodes: int | None = None) -> str:
    """Nodes, ranks, cores and devices; up to `most_nodes` nodes, each like the placement's."""
    if most_nodes:
        return (
            f"{placed.nodes} to {_many(most_nodes, 'node')}, {_many(placed.ranks_per_node, 'rank')}"
            f" a node, {_each(placed)}"
        )
    per_node = f"{placed.ranks_per_node} a node"
    if placed.straddles:
        per_node += f", {placed.last_node_ranks} on the last"
    return (
        f"{_many(placed.nodes, 'node')}, {_many(placed.ranks, 'rank')} ({per_node}), "
        f"{_each(placed)}"
    )


def _each(placed: Placement) -> str:
    devices = _many(placed.partitions, "device")
    return f"each with {devices} and {_many(placed.cores_per_rank, 'core')}"


def explain(placed: Placement) -> str:
    """The same, and which rank of a node gets which cores and devices: a line per kind of node."""
    lines = [in_one_line(placed)]
    full = placed.nodes - placed.straddles
    if full:
        lines.append(f"  {_many(full, 'node')}: {_ranks(placed, placed.ranks_per_node)}")
    if placed.straddles:
        lines.append(f"  last node: {_ranks(placed, placed.last_node_ranks)}")
    return "\n".join(lines)


def _ranks(placed: Placement, count: int) -> str:
    return "; ".join(
        f"rank {one.local_rank}: cores {_span(one.cores)}, devices {_span(one.devices)}"
        for one in placed.bindings[:count]
    )


def _span(numbers: tuple[int, ...]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
