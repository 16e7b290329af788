"""Describe the best plan in words: its layout, and why it beat the others."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tilenet.errors import TilenetError, one_line
from tilenet.geometry.halo import context_of
from tilenet.geometry.halo_rule import halo_rule
from tilenet.planning.compatibility import obstacle, off_grid, whole_image
from tilenet.planning.halo_modes import plan_modes
from tilenet.planning.kept_maps import kept_cells
from tilenet.planning.maps.choose import choose_map
from tilenet.planning.maps.passes import largest_strip
from tilenet.planning.maps.question import MapQuestion
from tilenet.planning.maps.strips import GPU_STRIP_PX
from tilenet.planning.memory.sweeps.swept_maps import swept_bytes
from tilenet.planning.plan import Plan, Question
from tilenet.planning.time.profile import check_precision
from tilenet.planning.time.roofline import ITEM_BYTES

GIB = 2**30
# As `predict` on a free GPU: feature maps take a quarter of its memory, tiles are at most so wide.
MAP_SHARE, MAP_TILE_PX = 4, 4096
MOST_BUBBLE = 0.5  # that goes without saying


def answer(question: Question, *, alone: bool = False) -> list[Plan]:
    """The best plan, its rivals, and the fastest with each other halo mode.

    Args:
        alone: Whether the best plan is all.

    Raises:
        TilenetError: The profile is of another precision; see `plan_modes`.
    """
    if question.profile is not None:
        check_precision(question.profile, question.precision)
    plans = plan_modes(question, alone=alone)
    return [replace(plan, notes=_notes(plan)) for plan in plans]


def _notes(plan: Plan) -> tuple[str, ...]:
    question = plan.question
    layers = question.layers
    notes = []
    context = context_of(layers)
    tiled = plan.halo_mode == "overlap" and plan.layout.grid != (1, 1)
    if tiled and plan.halo_px < context.halo_px:
        notes.append(
            f"approximate: the halo ({plan.halo_px} px) is narrower than the exact one "
            f"({context.halo_px} px), so the result depends on the tiles."
        )
    reason = obstacle(layers, plan.layout.grid, plan.mesh, plan.halo_mode)
    if plan.halo_mode == "overlap" and not reason:
        rule = halo_rule(question.halo, layers, question.epsilon_px)
        reason = off_grid(layers, question.halo, rule.alignment_px)
    if reason:
        notes.append(f"train refuses this plan as it stands: {reason}.")
    notes += _idle(plan)
    if plan.host_bytes > question.machine.rank_bytes:
        notes.append(
            f"a node's memory is too small for its ranks (needed: {plan.host_bytes / GIB:.0f} GiB, "
            f"there is: {question.machine.rank_bytes / GIB:.0f} of "
            f"{question.machine.host_bytes / GIB:.0f} GiB, the rest is for decoded blocks of "
            "images); take fewer micro-batches or ranks per node."
        )
    notes.append(_source_of_seconds(question))
    return tuple(notes)


def _source_of_seconds(question: Question) -> str:
    planned, profile = question.machine.device, question.profile
    if profile is None:
        return (
            f"No --profile is given: seconds are the roofline's for {planned}, with assumed "
            "efficiencies; tilenet profile measures them."
        )
    return (
        f"Seconds of layers were measured on {one_line(profile.device)} ({profile.precision}, "
        f"{in_px((profile.height, profile.width))}) and are taken for {planned}; where that is "
        "another device, profile on it."
    )


def _idle(plan: Plan) -> list[str]:
    """Name ranks without a tile, and devices that wait much for others of a pipeline.

    Neighbouring tiles go to one rank, so fewer tiles than ranks leave some without (`tiles_of`).
    """
    (replicas, *mesh), grid = plan.mesh, plan.layout.grid
    busy = min(replicas, plan.question.batch_size) * prod(map(min, mesh, grid))
    notes = []
    if busy < (ranks := plan.num_ranks):
        notes.append(
            f"{ranks - busy} of {ranks} ranks have no tile and compute nothing (tiles: {grid[0]} × "
            f"{grid[1]}, images of a step: {plan.question.batch_size}); take fewer --nodes or "
            "--devices-per-node, more tiles (--grid) or a larger --batch-size."
        )
    if plan.bubble > MOST_BUBBLE:
        notes.append(
            f"devices wait for one another {plan.bubble:.0%} of a step (partitions: "
            f"{plan.layout.partitions}, micro-batches: {plan.layout.micro_batches}); take fewer "
            "--partitions, or more --micro-batches of smaller tiles or of a larger --batch-size."
        )
    return notes


def explain(plans: Sequence[Plan]) -> str:
    """Return the best plan as text: its layout, and why it beat the others."""
    plan = plans[0]
    question, layout, node = plan.question, plan.layout, plan.question.machine
    replicas, rows, columns = plan.mesh
    lines = [
        f"{question.image[0]} × {question.image[1]} × {question.options.bands} px on "
        f"{question.nodes} × {node.devices_per_node} {node.device} ({node.name})",
        f"  tiles          {layout.grid[0]} × {layout.grid[1]}, own {in_px(plan.tile_own_px)}, "
        f"read {in_px(plan.tile_read_px)}, {_halo(plan)}; work ratio {plan.work_ratio:.2f}",
        f"  ranks          {replicas} × {rows} × {columns} (replicas × rows × columns), "
        f"{plan.ranks_per_node} per node, {_plural(layout.partitions, 'device')} each",
        f"  pipeline       {_pipeline(plan)}, bubble {plan.bubble:.0%}",
        f"  predicted      {in_gib(plan.device_bytes)} GiB per device of "
        f"{question.limit_bytes / GIB:.2f} planned with, {plan.host_bytes / GIB:.1f} GiB per node; "
        f"{in_seconds(plan.step_s)} per step (gradients {in_seconds(plan.sum_s)}"
        f"{_other_ranks(plan)}), "
        f"{in_seconds(plan.epoch_s)} per epoch{_node_hours(plan)}",
        *_states_lines(plan),
        *_swap_lines(plan),
        *_map_lines(plan),
        "",
        "  partition  layers  parameters    GiB   time   share",
    ]
    for number, part in enumerate(plan.parts):
        lines.append(
            f"  {number:>9}  {part.layers:>6}  {part.parameters:>10,}  {in_gib(part.num_bytes):>5}"
            f"  {in_seconds(part.seconds):>6}  {part.share:>5.0%}"
        )
    lines.append("")
    lines.extend(f"  instead of     {_rival(plan, other)}" for other in plans[1:])
    return "\n".join([*lines, *(f"\n{note}" for note in plan.notes)])


def _states_lines(plan: Plan) -> list[str]:
    if plan.sharers == 1:
        return []
    return [
        f"  optimizer      {plan.question.optimizer}, its states shared out by {plan.sharers} ranks"
    ]


def _rival(plan: Plan, other: Plan) -> str:
    """Another plan, and why it was not taken."""
    if other.halo_mode == plan.halo_mode:
        return f"{other.layout}: {_why(plan, other)}"
    balance = f" (balance {', '.join(map(str, other.balance))})" * (len(other.balance) > 1)
    return (
        f"halo_mode {other.halo_mode}, {other.layout}{balance}: "
        f"{other.step_s / plan.step_s:.2f} × the time, {in_gib(other.device_bytes)} GiB per device"
    )


def _pipeline(plan: Plan) -> str:
    """Describe the work that goes through the partitions."""
    layout = plan.layout
    tiles = f"{_plural(plan.tiles_per_rank, 'tile')} per rank{_stacked(plan)}"
    if layout.strip_rows is not None:
        size = in_px((layout.strip_rows, plan.tile_own_px[1]))
        return f"{tiles}, in strips of {size} at most, each computed twice forward"
    return (
        f"{tiles}, {'1f1b, ' * layout.flows}"
        f"{_plural(layout.micro_batches, 'micro-batch')} at once "
        f"({layout.micro_batches / layout.partitions:.3g} mbpp), "
        f"checkpointing {layout.checkpointing}"
    )


def _other_ranks(plan: Plan) -> str:
    """Name the seconds that layers and files add to a step, where they do."""
    waits = f", halos and norms {in_seconds(plan.exchange_s)}" if plan.exchange_s else ""
    late = plan.read_s >= plan.step_s
    return waits + (f", reading {in_seconds(plan.read_s)}, which it waits for" if late else "")


def _stacked(plan: Plan) -> str:
    if plan.stacked == 1:
        return ""
    return f", {plan.stacked} in a micro-batch for {whole_image(plan.question.layers)}"


def _swap_lines(plan: Plan) -> list[str]:
    if plan.swaps is None:
        return ["  swap           nothing"] if plan.question.swap != "off" else []
    moved = plan.swaps.swapped_bytes
    return [
        f"  swap           {plan.swaps}; {in_gib(moved)} GiB out and in per mini-batch of a rank, "
        f"{plan.swap_overhead:+.0%} time"
    ]


def _map_lines(plan: Plan) -> list[str]:
    """Describe the map that `predict` makes on these ranks, where it sweeps."""
    question, layers = plan.question, plan.question.layers
    if plan.layout.partitions > 1 or question.halo != "exact":
        return []
    rule = halo_rule("exact", layers)
    limit, item_bytes = question.limit_bytes // MAP_SHARE, ITEM_BYTES[question.precision]
    ranks = plan.num_ranks
    map_question = MapQuestion(
        layers, question.image, rule, False, None, ranks, item_bytes, limit, MAP_TILE_PX,
        sweep_bytes=limit, strip_overhead_px=GPU_STRIP_PX,
    )  # fmt: skip
    try:
        chosen = choose_map(map_question)
    except TilenetError:  # `predict` says it, of the run's own images
        return []
    if chosen.method != "sweep":
        return []
    tiling = chosen.tiling
    rows, cols = largest_strip(tiling)
    num_bytes = swept_bytes(layers, tiling.extended[0], cols, rows, item_bytes)
    num_bytes += kept_cells(layers, chosen.kept_maps, tiling.extended) * item_bytes
    return [
        f"  map            swept in strips of {rows} × {cols} px over {_plural(ranks, 'rank')}, "
        f"work ratio {chosen.work_ratio:.2f}; {in_gib(num_bytes)} GiB of feature maps per rank"
    ]


def _why(plan: Plan, other: Plan) -> str:
    """Name the ways that the other plan is worse in."""
    reasons = [f"{other.step_s / plan.step_s:.2f} × the time"]
    if other.work_ratio > 1.01 * plan.work_ratio:
        reasons.append(f"work ratio {other.work_ratio:.2f} against {plan.work_ratio:.2f}")
    if other.bubble > plan.bubble + 0.01:
        reasons.append(f"bubble {other.bubble:.0%} against {plan.bubble:.0%}")
    pixels, more = (p.tiles_per_rank * prod(p.tile_read_px) for p in (plan, other))
    if other.mesh == plan.mesh and more > 1.01 * pixels:
        reasons.append("more pixels on the rank with most")
    order = ("never", "except_last", "always")
    if order.index(other.layout.checkpointing) > order.index(plan.layout.checkpointing):
        reasons.append("computes activations twice")
    return ", ".join(reasons)


def _node_hours(plan: Plan) -> str:
    """Name the node-hours, which projects on clusters pay with."""
    nodes = plan.question.nodes
    return f", {nodes * plan.epoch_s / 3600:.2g} node-hours" * (nodes > 1)


def _halo(plan: Plan) -> str:
    if plan.halo_mode != "overlap":
        alone = plan.layout.grid == (1, 1)
        return "no halo" if alone else "halo exchanged between ranks"
    return f"halo {plan.halo_px} px, overlap"


def _plural(count: int, what: str) -> str:
    """`1 tile`, `2 micro-batches`."""
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('ch') else 's'}"


def in_gib(num_bytes: int) -> str:
    """GiB with two decimals, with more of them where two would say nothing."""
    value = num_bytes / GIB
    return f"{value:.2f}" if value >= 0.1 else f"{value:.1g}"


def in_px(size: tuple[int, int]) -> str:
    return f"{size[0]} × {size[1]} px"


def in_seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
