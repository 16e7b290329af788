"""A placement as text, so that a wrong one is seen before the job waits in a queue."""

from .placement import Placement


def in_one_line(placed: Placement, most_nodes: int | None = None) -> str:
    """Nodes, ranks, cores and devices; up to `most_nodes` nodes, each like the placement's."""
    if most_nodes:
        return (
            f"{placed.nodes} to {_plural(most_nodes, 'node')}, "
            f"{_plural(placed.ranks_per_node, 'rank')} a node, {_each(placed)}"
        )
    per_node = f"{placed.ranks_per_node} a node"
    if placed.straddles:
        per_node += f", {placed.last_node_ranks} on the last"
    return (
        f"{_plural(placed.nodes, 'node')}, {_plural(placed.ranks, 'rank')} ({per_node}), "
        f"{_each(placed)}"
    )


def _each(placed: Placement) -> str:
    devices = _plural(placed.partitions, "device")
    return f"each with {devices} and {_plural(placed.cores_per_rank, 'core')}"


def explain(placed: Placement) -> str:
    """The same, and which rank of a node gets which cores and devices: a line per kind of node."""
    lines = [in_one_line(placed)]
    full = placed.nodes - placed.straddles
    if full:
        lines.append(f"  {_plural(full, 'node')}: {_ranks(placed, placed.ranks_per_node)}")
    if placed.straddles:
        lines.append(f"  last node: {_ranks(placed, placed.last_node_ranks)}")
    return "\n".join(lines)


def _ranks(placed: Placement, count: int) -> str:
    return "; ".join(
        f"rank {binding.local_rank}: cores {_span(binding.cores)}, devices {_span(binding.devices)}"
        for binding in placed.bindings[:count]
    )


def _span(numbers: tuple[int, ...]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
