"""Lines that a training run prints at its start."""

from dataclasses import replace
from pathlib import Path

from tilenet.adoption.adopt import Adopted
from tilenet.data.alike import band_notes
from tilenet.data.crops import MOST_CELL_BYTES
from tilenet.data.labels.open import resampling_note
from tilenet.data.rasters.onto_grid import resampling_notes
from tilenet.data.schedule import Sample
from tilenet.geometry.halo import norm_context
from tilenet.geometry.layers import GlobalPool, Layer, Norm
from tilenet.geometry.tiles import Tile, Tiling
from tilenet.parallel.exchange.swept_training import SweptPipe
from tilenet.parallel.health.progress import say
from tilenet.planning.mesh import tiles_of
from tilenet.planning.plan import read_plan
from tilenet.training.images.open import RunImages
from tilenet.training.network import RunNetwork
from tilenet.training.setup.run_plan import RunPlan
from tilenet.training.swept import AnyPipe


def announce_images(opened: RunImages, plan: RunPlan, *, as_made: bool) -> None:
    """Print resampled bands and labels, held-out images and blocks, and the places of crops.

    Args:
        as_made: Whether a module starts with its own weights, not with those of a checkpoint.
    """
    if plan.adopted is not None:
        context = plan.record.context()
        layer, name = plan.record.opaque, plan.adopted.name
        equal_note = (
            f"{name} is the same network as its {len(plan.record.layers)} layers; alignment "
            f"{context.alignment_px} px, halo {context.halo_px} px"
        )
        say(equal_note if layer is None else f"{name} is trained as it is, {layer.note}")
    if plan.note:
        say(plan.note)
    idle = num_idle_norms(plan.adopted) if as_made and plan.adopted is not None else 0
    if idle:
        say(
            f"the running statistics of all batch norms ({idle}) are as made, with mean 0 and "
            "variance 1, and frozen, so they do not normalise; "
            + "set network.batch_norm: step, or " * (plan.halo_mode != "windows")
            + "give trained weights (network.weights)"
        )
    for sentence in band_notes(opened.all_images):
        say(sentence)
    views = [view for image in opened.all_images for view in image.stack.resampled]
    for sentence in resampling_notes(views):
        say(sentence)
    if note := resampling_note(opened.all_labels):
        say(note)
    held_out, context = opened.held_out, plan.record.context()
    if held_out is not None:
        note = (
            f"validation: {held_out.num_chosen} of {held_out.num_blocks} blocks of "
            f"{held_out.block_px} px are held out; training leaves out labels within "
            f"{context.context_any_pixel_px} px of them, too"
        )
        say(note + _name_sums(plan.record.layers))
        far_px = context.context_any_pixel_px
        reached = held_out.num_reached(far_px) if held_out.block_px <= 2 * far_px else 0
        if reached:
            say(
                f"validation: {reached} of {held_out.num_chosen} held-out blocks have no pixel "
                f"whose network looks at held-out pixels only ({far_px} px around it); choose "
                f"validation.block_px above {2 * far_px}, or name validation.images"
            )
    if plan.crop_px is not None and plan.cell_px != context.alignment_px:
        say(
            f"crops start on multiples of {plan.cell_px} px instead of {context.alignment_px} px, "
            "since where labels are in images so large is kept in at most "
            f"{MOST_CELL_BYTES >> 20} MiB"
        )


def _name_sums(layers: tuple[Layer, ...]) -> str:
    """Name the sums over all pixels, for the end of a sentence on those that are held out."""
    norm = norm_context(layers)
    pools = sorted({layer.takes for layer in layers if isinstance(layer, GlobalPool)})
    sums = [f"the statistics of norms ({norm})"] * (norm != "none")
    sums += [f"pools over whole images or crops ({', '.join(pools)})"] * bool(pools)
    return f", but {' and '.join(sums)} are of held-out pixels as well" if sums else ""


def num_idle_norms(adopted: Adopted) -> int:
    """Number of batch norms if all are frozen with initial running statistics, else 0."""
    norms = (layer for layer in adopted.layers if isinstance(layer, Norm) and layer.norm == "batch")
    number = sum(name.endswith("running_var") for name in adopted.names)
    state = [(name, adopted.state[own]) for name, own in adopted.names.items()]
    as_made = all(
        bool((tensor == name.endswith("running_var")).all())
        for name, tensor in state
        if name.endswith(("running_mean", "running_var"))
    )
    return number if as_made and all(norm.scope == "frozen" for norm in norms) else 0


def announce(
    plan: RunPlan,
    pipe: AnyPipe,
    sample: Sample,
    steps: int,
    transport: str,
    num_ranks: int,
    state_bytes: int | None,
) -> None:
    """Print the layout of the run, and everything that makes the result approximate.

    Args:
        sample: An image or crop of the first step.
        steps: Number of steps left.
        transport: Transport of gradients between ranks.
        num_ranks: Ranks of the run.
        state_bytes: Most bytes of the optimizer's states that a rank keeps, if ranks share them
            out; None: each rank keeps all.
    """
    mesh, rule = plan.mesh, plan.rule
    parameters = sum(parameter.numel() for parameter in pipe.network.parameters())
    tiling = plan.tiling(*sample.size)
    rows, cols = tiling.grid
    states = ""
    if state_bytes is not None:
        states = f"; of the optimizer's states each rank keeps {state_bytes / 2**20:.1f} MiB"
    say(
        f"{len(plan.record.layers)} layers, {parameters:,} parameters; "
        f"{mesh.replicas} × {mesh.rows} × {mesh.columns} ranks on "
        f"{pipe.devices[0].type}; "
        f"{rows} × {cols} tiles, "
        + ("halo exchanged" if rule.exchanged else f"halo {rule.halo_px} px")
        + ", swept" * plan.swept
        + f", {plan.merged} micro-batches in one" * (plan.merged > 1)
        + f", work ratio {tiling.work_ratio:.2f}; "
        f"{steps} steps" + f"; gradients over {transport}" * (num_ranks > 1) + states
    )
    if plan.checkpointing != "never" or len(plan.balance) > 1:
        say(_pipeline(plan, pipe, tiling.tiles[0]))
    _say_sub_tiles(plan, tiling, sample)
    if not rule.exact and plan.halo_mode != "windows":
        context = plan.record.context()
        say(
            f"approximate: the halo ({rule.halo_px} px) is not the exact one "
            f"({context.halo_px} px, aligned to {context.alignment_px}), so the result "
            "depends on the tiles; halo: exact makes it independent"
        )
    if norm_context(plan.record.layers) == "tile":
        say(
            "approximate: normalisation uses the statistics of each tile (norm_scope: tile), "
            "so the result depends on the tiles, though not on the ranks"
        )
    idle = sum(not tiles_of(mesh.place(rank), mesh, tiling.grid) for rank in range(mesh.num_ranks))
    if idle:
        say(f"{idle} of {mesh.num_ranks} ranks have no tile; use fewer ranks or more tiles")


def say_states_beyond(path: str, network: RunNetwork) -> None:
    """Say that a rank keeps more of the optimizer's states than the plan counted, if it does."""
    sharers = read_plan(Path(path)).sharers
    if more := network.bytes_beyond(sharers):
        say(
            f"each rank keeps {more / 2**20:.1f} MiB more of the optimizer's states than planned "
            f"(shared out by {network.sharers}, in {path} by {sharers}): it may not fit; set "
            "optimizer.shard: auto, or plan for as many ranks"
        )


def _pipeline(plan: RunPlan, pipe: AnyPipe, tile: Tile) -> str:
    """The line on partitions and micro-batches."""
    where = ", ".join(map(str, pipe.devices))
    parts = f"pipeline: {'+'.join(map(str, plan.balance))} layers on {where}; "
    if isinstance(pipe, SweptPipe):
        idle = pipe.idle_share(tile.read)
        return f"{parts}strips as micro-batches, {idle:.0%} of the time idle"
    return (
        f"{parts}{plan.pipeline}, at most {plan.micro_batches} micro-batches at once; "
        f"checkpointing {plan.checkpointing}"
    )


def _say_sub_tiles(plan: RunPlan, tiling: Tiling, sample: Sample) -> None:
    if plan.uncut is not None:
        before = replace(plan, requested=plan.uncut)
        whole = before.tiling(*sample.size)
        say(
            f"sub-tiles: {whole.grid[0]} × {whole.grid[1]} tiles are fewer than micro-batches "
            f"and were cut finer, which raises the work ratio from {whole.work_ratio:.2f} to "
            f"{tiling.work_ratio:.2f}; images or crops (batch_size) as micro-batches cost none"
        )
