"""`tilenet plan`: from image, network and machine to tiles, ranks, partitions and micro-batches."""

import json
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from tilenet.cli.options import Arguments, add_network, add_tiles, image_of, network_of
from tilenet.errors import TilenetError, UsageError
from tilenet.geometry.halo import context_of, epsilon_px
from tilenet.geometry.tiles import halo_rule
from tilenet.geometry.unet import unet_layers
from tilenet.planning.advise import question_again, sweep, why_nothing_fits
from tilenet.planning.compatibility import obstacle, whole_image
from tilenet.planning.machines import known_machines, machine
from tilenet.planning.maps import MapQuestion, choose_map
from tilenet.planning.memory.paper import level_bytes
from tilenet.planning.memory.swept import swept_bytes
from tilenet.planning.plan import Plan, Question, write_plan
from tilenet.planning.search import Search
from tilenet.planning.time.profile import read_profile
from tilenet.planning.time.roofline import ITEM_BYTES
from tilenet.report.charts import plot_level_bytes, plot_timeline

__all__ = ["answer", "explain", "main"]

GIB = 2**30
# As `predict` on a free GPU: feature maps take a quarter of its memory, tiles are at most so wide.
MAP_SHARE, MAP_TILE_PX = 4, 4096


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    try:
        given = _parser().parse_args(arguments)
        question = _question(given, arguments)
        if given.sweep and (given.plot or given.out):
            raise UsageError("--sweep prints a table; leave --plot and -o out")
        if given.sweep:
            rows = sweep(question)
            print(json.dumps(rows) if given.json else _sweep_table(rows))
            return 0
        search = Search(question)
        plans = answer(search)
        for path in given.plot or []:
            _plot(search, plans[0], Path(path))
        if given.out:
            write_plan(plans[0], Path(given.out))
    except UsageError as error:
        print(f"tilenet plan: {error}", file=sys.stderr)
        return 2
    except TilenetError as error:
        print(f"tilenet: {error}", file=sys.stderr)
        return 1
    print(json.dumps(plans[0].to_json()) if given.json else explain(plans))
    return 0


def answer(search: Search) -> list[Plan]:
    """The best plan and the next two.

    Raises:
        TilenetError: Nothing fits; the sentence says what would.
    """
    plans = search.answer()
    if not plans:
        raise TilenetError(why_nothing_fits(search))
    return [replace(plan, notes=_notes(plan)) for plan in plans]


def _notes(plan: Plan) -> tuple[str, ...]:
    asked = plan.question
    layers = unet_layers(asked.options)
    notes = []
    context = context_of(layers)
    if asked.halo_mode == "exchange":
        notes.append("Seconds do not count the halos' way between ranks.")
    elif plan.layout.grid != (1, 1) and plan.halo_px < context.halo_px:
        notes.append(
            f"approximate: the halo ({plan.halo_px} px) is narrower than the exact one "
            f"({context.halo_px} px), so the result depends on the tiles."
        )
    together = plan.tiles_per_rank // -(-asked.batch_size // plan.mesh[0])
    if whole_image(layers) and together > 1:
        notes.append(
            f"{whole_image(layers)} over the whole image takes the {together} tiles of an "
            "image on a rank in one batch, and the bytes above are for one at a time; use "
            "--halo-mode exchange, or --norm-scope tile (approximate)."
        )
    reason = obstacle(layers, plan.layout.grid, plan.mesh, asked.halo_mode)
    if reason:
        notes.append(f"train refuses this plan as it stands: {reason}.")
    if plan.host_bytes > asked.machine.host_bytes:
        notes.append(
            f"a node's memory is too small for its ranks (needed: {plan.host_bytes / GIB:.0f} GiB, "
            f"there is: {asked.machine.host_bytes / GIB:.0f} GiB); take fewer micro-batches or "
            "ranks per node."
        )
    if asked.profile is None:
        notes.append(
            f"Seconds are the roofline's for {asked.machine.device}, with assumed efficiencies; "
            "tilenet profile measures them."
        )
    return tuple(notes)


def explain(plans: Sequence[Plan]) -> str:
    """The best plan as text: what, where, and why it beat the others."""
    plan = plans[0]
    asked, layout = plan.question, plan.layout
    replicas, rows, columns = plan.mesh
    lines = [
        f"{asked.image[0]} × {asked.image[1]} × {asked.options.bands} px on {asked.nodes} × "
        f"{asked.machine.devices_per_node} {asked.machine.device} ({asked.machine.name})",
        f"  tiles          {layout.grid[0]} × {layout.grid[1]}, own {_px(plan.tile_own_px)}, read "
        f"{_px(plan.tile_read_px)}, {_halo(plan)}; work ratio {plan.work_ratio:.2f}",
        f"  ranks          {replicas} × {rows} × {columns} (replicas × rows × columns), "
        f"{plan.ranks_per_node} per node, {_many(layout.partitions, 'device')} each",
        f"  pipeline       {_many(plan.tiles_per_rank, 'tile')} per rank, "
        f"{_many(layout.micro_batches, 'micro-batch')} at once "
        f"({layout.micro_batches / layout.partitions:.3g} mbpp), "
        f"checkpointing {layout.checkpointing}, bubble {plan.bubble:.0%}",
        f"  predicted      {_gib(plan.device_bytes)} GiB per device of "
        f"{asked.limit_bytes / GIB:.2f} planned with, {plan.host_bytes / GIB:.1f} GiB per node; "
        f"{_seconds(plan.step_s)} per step (gradients {_seconds(plan.sum_s)}"
        f"{_other_ranks(plan)}), "
        f"{_seconds(plan.epoch_s)} per epoch",
        *_swap_lines(plan),
        *_map_lines(plan),
        "",
        "  partition  layers  parameters    GiB   time   share",
    ]
    for number, part in enumerate(plan.parts):
        lines.append(
            f"  {number:>9}  {part.layers:>6}  {part.parameters:>10,}  {_gib(part.num_bytes):>5}"
            f"  {_seconds(part.seconds):>6}  {part.share:>5.0%}"
        )
    lines.append("")
    lines.extend(f"  instead of     {one.layout}: {_why(plan, one)}" for one in plans[1:])
    return "\n".join([*lines, *(f"\n{note}" for note in plan.notes)])


def _other_ranks(plan: Plan) -> str:
    """What layers and files add to a step, where they do."""
    waits = f", halos and norms {_seconds(plan.exchange_s)}" if plan.exchange_s else ""
    late = plan.read_s >= plan.step_s
    return waits + (f", reading {_seconds(plan.read_s)}, which it waits for" if late else "")


def _swap_lines(plan: Plan) -> list[str]:
    if plan.swaps is None:
        return ["  swap           nothing"] if plan.question.swap != "off" else []
    moved = plan.swaps.swapped_bytes
    return [
        f"  swap           {plan.swaps}; {_gib(moved)} GiB out and in per mini-batch of a rank, "
        f"{plan.swap_overhead:+.0%} time"
    ]


def _map_lines(plan: Plan) -> list[str]:
    """How `predict` maps the image on these ranks, where it sweeps."""
    asked, layers = plan.question, unet_layers(plan.question.options)
    if plan.layout.partitions > 1 or asked.halo != "exact":
        return []
    rule = halo_rule("exact", context_of(layers), layers, 0)
    limit, item_bytes = asked.limit_bytes // MAP_SHARE, ITEM_BYTES[asked.precision]
    ranks = prod(plan.mesh)
    question = MapQuestion(
        layers, asked.image, rule, False, None, ranks, item_bytes, limit, MAP_TILE_PX,
        sweep_bytes=limit,
    )  # fmt: skip
    try:
        found = choose_map(question)
    except TilenetError:  # `predict` says it, of the run's own images
        return []
    if found.method != "sweep":
        return []
    tiling = found.tiling
    rows, cols = max(row.own for row in tiling.rows), max(col.read for col in tiling.cols)
    num_bytes = swept_bytes(layers, tiling.extended[0], cols, rows, item_bytes)
    return [
        f"  map            swept in strips of {rows} × {cols} px over {_many(ranks, 'rank')}, "
        f"work ratio {found.work_ratio:.2f}; {_gib(num_bytes)} GiB of feature maps per rank"
    ]


def _why(plan: Plan, other: Plan) -> str:
    """In what the other is worse."""
    reasons = [f"{other.step_s / plan.step_s:.2f} × the time"]
    if other.work_ratio > 1.01 * plan.work_ratio:
        reasons.append(f"work ratio {other.work_ratio:.2f} against {plan.work_ratio:.2f}")
    if other.bubble > plan.bubble + 0.01:
        reasons.append(f"bubble {other.bubble:.0%} against {plan.bubble:.0%}")
    if other.mesh == plan.mesh and other.tiles_per_rank * other.tile_read_px[
        0
    ] * other.tile_read_px[1] > (
        1.01 * plan.tiles_per_rank * plan.tile_read_px[0] * plan.tile_read_px[1]
    ):
        reasons.append("more pixels on the rank with most")
    order = ("never", "except_last", "always")
    if order.index(other.layout.checkpointing) > order.index(plan.layout.checkpointing):
        reasons.append("computes activations twice")
    return ", ".join(reasons)


def _sweep_table(rows: list[dict[str, Any]]) -> str:
    lines = ["  grid  read px      E  1 + 4qε/N    GiB     step"]
    fitting = [row["step_s"] for row in rows if row["fits"]]
    for row in rows:
        size = f"{row['device_bytes'] / GIB:.2f}" if "device_bytes" in row else "-"
        took = _seconds(row["step_s"]) if row["fits"] else "does not fit"
        best = "  ← fastest" if row["fits"] and row["step_s"] == min(fitting) else ""
        grid = f"{row['grid']:>3} × {row['grid']:<2} {row['tile_read_px']:>6}"
        ratios = f"{row['work_ratio']:>5.2f}  {row['formula_ratio']:>9.2f}"
        lines.append(f"{grid}  {ratios}  {size:>5}  {took:>7}{best}")
    return "\n".join(lines)


def _plot(search: Search, plan: Plan, path: Path) -> None:
    """`memory.png` and its like draw the levels' bytes, every other name the timeline."""
    if "memory" in path.name:
        item_bytes = ITEM_BYTES[plan.question.precision]
        levels = level_bytes(plan.question.options, max(plan.tile_read_px), item_bytes)
        title = f"Feature maps of a {_px(plan.tile_read_px)} tile"
        plot_level_bytes(levels.encoder, levels.decoder, path, title)
        return
    many = min(plan.layout.micro_batches, plan.tiles_per_rank)
    timeline = search.estimator.timeline(plan.layout, plan.balance, many)
    plot_timeline(timeline, path, f"One mini-batch: {plan.layout}")


def _halo(plan: Plan) -> str:
    if plan.question.halo_mode == "exchange":
        return "halo exchanged between ranks"
    return f"halo {plan.halo_px} px, overlap"


def _many(count: int, what: str) -> str:
    """`1 tile`, `2 micro-batches`."""
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('ch') else 's'}"


def _gib(num_bytes: int) -> str:
    """GiB with two decimals, with more of them where two would say nothing."""
    value = num_bytes / GIB
    return f"{value:.2f}" if value >= 0.1 else f"{value:.1g}"


def _px(size: tuple[int, int]) -> str:
    return f"{size[0]} × {size[1]} px"


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _question(given: Namespace, arguments: Sequence[str]) -> Question:
    if given.again is not None:
        _check_alone(arguments)
        return question_again(Path(given.again), given.nodes)
    options, levels = network_of(given)
    image, tiles = image_of(given)
    if image is None:
        raise UsageError("a plan needs --image")
    facts = machine(given.machine)
    changes: dict[str, Any] = {}
    if given.devices_per_node is not None:
        changes["devices_per_node"] = _positive("--devices-per-node", given.devices_per_node)
    if given.device_gib is not None:
        changes["memory_bytes"] = int(_positive("--device-gib", given.device_gib) * GIB)
    facts = replace(facts, **changes) if changes else facts
    return Question(
        options=options,
        epsilon_px=epsilon_px(levels, options.convolutions, options.kernel),
        image=image,
        machine=facts,
        nodes=given.nodes,
        num_images=given.images,
        batch_size=given.batch_size,
        precision=given.precision,
        optimizer=given.optimizer,
        halo=given.halo,
        halo_mode=given.halo_mode,
        grid=tiles.grid,
        tile_px=tiles.size_px,
        partitions=given.partitions
        if given.partitions is not None or given.balance is None
        else len(given.balance),
        balance=given.balance,
        micro_batches=given.micro_batches,
        mbpp=given.mbpp,
        checkpointing=given.checkpointing,
        swap=given.swap,
        reserve=given.reserve,
        profile=read_profile(Path(given.profile)) if given.profile else None,
    )


def _check_alone(arguments: Sequence[str]) -> None:
    """Refuse what the plan that is made again already says."""
    for word in arguments:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in ("--again", "--nodes", "--out", "--json"):
            raise UsageError(f"with --again only --nodes, -o and --json may be given, not {name}")


def _positive(name: str, value: float) -> Any:
    if not 0 < value < 2**40:
        raise UsageError(f"{name} must be above 0 ({name}: {value})")
    return value


def _balance(text: str) -> tuple[int, ...]:
    """`14,24,30,22,12,7`: layers per partition."""
    parts = text.split(",")
    if not all(part.strip().removeprefix("-").isdecimal() for part in parts):
        raise ArgumentTypeError(f"expected whole numbers with commas between, got {text!r}")
    return tuple(int(part) for part in parts)


def _parser() -> Arguments:
    parser = Arguments(
        prog="tilenet plan",
        description="Choose tiles, ranks, partitions and micro-batches; predict bytes and seconds.",
    )
    add_network(parser)
    add_tiles(parser)
    where = parser.add_argument_group("machine")
    where.add_argument("--machine", default="local", metavar="|".join(known_machines()))
    where.add_argument("--nodes", type=int, default=1, metavar="N")
    where.add_argument("--devices-per-node", type=int, metavar="N")
    where.add_argument("--device-gib", type=float, metavar="GIB", help="memory of one device")
    where.add_argument(
        "--reserve", type=float, default=0.1, help="share of it kept free (%(default)s)"
    )
    where.add_argument("--profile", metavar="FILE", help="layer times from tilenet profile")
    run = parser.add_argument_group("run")
    run.add_argument("--images", type=int, default=1, metavar="N", help="images of an epoch")
    run.add_argument("--batch-size", type=int, default=1, metavar="N", help="images of a step")
    run.add_argument("--precision", choices=list(ITEM_BYTES), default="float32")
    run.add_argument("--optimizer", choices=["adamw", "sgd-momentum", "sgd"], default="adamw")
    run.add_argument("--halo-mode", choices=["overlap", "exchange"], default="overlap")
    run.add_argument("--partitions", type=int, metavar="N", help="devices per rank")
    run.add_argument("--balance", type=_balance, metavar="L,L,…", help="layers per partition")
    run.add_argument("--micro-batches", type=int, metavar="N", help="tiles at once, in all")
    run.add_argument("--mbpp", type=int, metavar="N", help="the same, per partition")
    run.add_argument("--checkpointing", choices=["always", "except_last", "never"])
    run.add_argument(
        "--swap",
        choices=["off", "auto", "all"],
        default="off",
        help="tensors that wait on the host: none, what must, what can",
    )
    parser.add_argument(
        "--again",
        metavar="PLAN",
        help="that plan for another number of --nodes: the same tiles, other ranks",
    )
    parser.add_argument("--sweep", choices=["grid"], help="compare grids of 4 × 4 to 16 × 16")
    parser.add_argument(
        "--plot",
        action="append",
        metavar="FILE",
        help="draw the timeline, or, where the name contains memory, the levels' bytes",
    )
    parser.add_argument("-o", "--out", metavar="plan.json", help="for train and predict")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
