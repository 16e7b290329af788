"""Raster in, map out: ranks compute tiles in turn, rank 0 writes them, memory stays bounded.

Norms over the whole image need more than a tile: `planning.maps` chooses how they get it.
"""

import os
from contextlib import ExitStack, nullcontext
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilenet.data.rasters.raster import Raster
from tilenet.data.survey import share_collars
from tilenet.errors import TilenetError
from tilenet.geometry.layers import Norm
from tilenet.geometry.tiles import halo_rule
from tilenet.geometry.windows import Part, Window, overlap
from tilenet.mapping.job import MapJob, Mapper, Output, WritingSink, decide_map
from tilenet.mapping.journal import file_facts, hash_of
from tilenet.mapping.resume import MapResume
from tilenet.mapping.writer import MapWriter, check_target, journal_of, map_lock
from tilenet.model.choices import parameter_dtype
from tilenet.model.network import build_network, check_weight_count, load_weights
from tilenet.parallel.health.progress import peak_bytes, say
from tilenet.parallel.health.signals import StopAgreed, StopRequests
from tilenet.parallel.health.watchdog import SLOW, Watchdog
from tilenet.parallel.ranks.comm import agreed, wait_quietly, world
from tilenet.parallel.ranks.devices import choose_devices, node_place, say_layout
from tilenet.parallel.ranks.start import kept_on_ctrl_c
from tilenet.planning.balance import check_balance, likely_balance
from tilenet.planning.maps import MapPlan
from tilenet.storage.checkpoints import checked_checkpoint, find_checkpoint, load_json, load_tensors
from tilenet.storage.lock import Lock
from tilenet.storage.network_json import NetworkRecord

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Prediction", "predict"]


@dataclass(frozen=True)
class Prediction:
    """What to map and how.

    Attributes:
        checkpoint: A checkpoint's folder, or a training run's.
        image: Any raster with the bands that the network reads, or files joined by plus signs.
        out: The map's path.
        output: Class numbers, or one band per class of logits or probabilities.
        tile_px: Largest own size; None: as much as memory allows. With norms over the whole image
            it selects passes tile after tile.
        halo: `exact`, `epsilon` or pixels.
        precision: None: that of the training run.
        device: `auto`, `cpu` or `cuda`, or a list with one device per partition.
        partitions: Devices per rank.
        balance: Layers per partition; None: the fastest by the roofline.
        nodata: As in run files; None: as in training.
        bands: As in run files; None: as in training, those asked for by name found by name.
        scaled: Probabilities as bytes: the nearest of 0, 1/250 … 1, which GDAL unscales.
        bbox: xmin, ymin, xmax, ymax in the image's CRS: map the pixels under it; None: all.
        window: Row, column, height and width of the pixels to map, instead of `bbox`.
        resume: Go on with what an interrupted map left, and leave what is done when interrupted.
        overwrite: Whether an existing map may be replaced.
        hang_seconds: End the job when a round of tiles takes longer; 0: never.
    """

    checkpoint: str
    image: str
    out: str
    output: Output = "classes"
    tile_px: int | None = None
    halo: int | str = "exact"
    precision: str | None = None
    device: str | list[str] = "auto"
    partitions: int = 1
    balance: tuple[int, ...] | None = None
    nodata: float | str | None = None
    bands: tuple[int | str, ...] | None = None
    scaled: bool = False
    bbox: tuple[float, ...] | None = None
    window: tuple[int, ...] | None = None
    resume: bool = False
    overwrite: bool = False
    hang_seconds: float = 1800.0


def predict(wanted: Prediction, comm: "MPI.Intracomm | None" = None) -> dict[str, Any]:
    """Make a map of an image. Collective: all ranks of `comm`, None: of the job, call it.

    Returns:
        What was done: tiles, their sizes, the peak resident memory of each rank in bytes, and
        whether the ranks stopped before the map was done, because one was asked to.

    Raises:
        AgreedError: On all ranks, for what any rank found wrong before the first tile.
        TilenetError: On one rank, for a file that breaks later.
    """
    comm = world() if comm is None else comm
    with kept_on_ctrl_c(lambda: _how_to_go_on(wanted)), ExitStack() as stack:
        with agreed(comm):
            _check_choices(wanted)
            who = f"rank {comm.rank} of {comm.size}"
            watchdog = stack.enter_context(Watchdog(wanted.hang_seconds, who))
        requests = StopRequests()
        if wanted.resume:  # from here on: MPICH catches SIGUSR1 itself, and forgets it
            stack.enter_context(requests)
        watchdog.arm("opening the checkpoint and the image", SLOW)
        lock: Lock | None = None
        place = node_place(comm, wanted.device)
        with agreed(comm):
            if comm.rank == 0:
                check_target(wanted.out, overwrite=wanted.overwrite, image=wanted.image)
                lock = stack.enter_context(map_lock(wanted.out, say))
                # Once more: another job may have made the map while this one waited for the lock.
                check_target(wanted.out, overwrite=wanted.overwrite, image=wanted.image)
            # One rank reads all bytes and compares them; no rank goes on where it finds them wrong.
            find = checked_checkpoint if comm.rank == 0 else find_checkpoint
            folder = find(Path(wanted.checkpoint))
            record = NetworkRecord.from_json(load_json(folder / "network.json"))
            nodata = record.nodata if wanted.nodata is None else wanted.nodata
            image = stack.enter_context(
                Raster(wanted.image, wanted.bands or record.wanted_bands, record.resolution, nodata)
            )
            if len(image.bands) != len(record.bands):
                raise TilenetError(
                    f"the network reads as many bands as it was trained on (trained on: "
                    f"{len(record.bands)}, bands: {len(image.bands)}); name each of them in order"
                )
            if isinstance(wanted.device, list) and len(wanted.device) != wanted.partitions:
                raise TilenetError(
                    f"a list of devices names one per partition (device: {wanted.device}, "
                    f"partitions: {wanted.partitions}); one device may be named several times"
                )
            devices = choose_devices(wanted.device, place, wanted.partitions)
            precision = wanted.precision or record.precision
            dtype = parameter_dtype(precision)
            weights = load_tensors(folder / "weights.safetensors")
            check_weight_count(record.layers, weights, str(folder))
            network = build_network(record.layers, dtype=dtype)
            load_weights(network, weights, str(folder))
            del weights
            rule = halo_rule(wanted.halo, record.context(), record.layers, record.epsilon_px)
            window = image.window_of(Part(wanted.bbox, wanted.window))
        try:
            share_collars([image], comm, watchdog, requests)
        except StopAgreed:
            return {"map": wanted.out, "stopped": True}
        watchdog.arm("the start of the map", SLOW)
        plan = decide_map(
            record,
            image.size,
            rule,
            devices[0],
            dtype,
            comm,
            halo_asked=wanted.halo != "exact",
            tile_px=wanted.tile_px,
        )
        read = plan.tiling.tiles[0].read
        with agreed(comm):
            balance = wanted.balance or likely_balance(
                record.layers, (read.height, read.width), wanted.partitions
            )
            check_balance(balance, len(record.layers), wanted.partitions)
        say_layout(comm, place, devices)
        if comm.rank == 0:
            _announce(plan, record, wanted)
            _announce_part(plan, window, image)
            if image.ground.lacks:
                say(
                    f"the image has {image.ground.lacks}, and so has the map: {image.ground.remedy}"
                )
        mapper = Mapper(wanted.output, record, image, plan.tiling, dtype, scaled=wanted.scaled)
        job = MapJob(
            plan,
            mapper,
            network.eval(),
            tuple(balance),
            devices,
            precision,
            watchdog,
            what=os.path.basename(image.files[0]),
        )
        # One pass over windows that ranks hold at once has nothing to go on with.
        resumes = wanted.resume and plan.method != "exchange"
        if wanted.resume and not resumes:
            requests.release()
            if comm.rank == 0:
                say("a map in one pass over shares of the ranks is not interrupted: it starts over")
        with agreed(comm):
            made_of = None
            if resumes and comm.rank == 0:
                made_of = _made_of(wanted, job, folder, window)
        # Opened before the work: what cannot be written is known before hours have passed.
        target = (
            MapWriter(wanted.out, image, mapper.kind, window, made_of, lock)
            if comm.rank == 0
            else nullcontext()
        )
        with target as writer:
            if writer is not None and writer.why_anew:
                say(f"the map starts over, since what was done of it is {writer.why_anew}")
            resume = MapResume(comm, plan.tiling, writer, requests) if resumes else None
            sink = WritingSink(mapper, comm, writer, window, resume)
            stopped = _work(job, comm, sink, resume)
            # Compressing it takes as many rounds of tiles as it has, at the most.
            tiles = len(plan.tiling.tiles)
            watchdog.arm("the finished map", SLOW + tiles / comm.size)
            if writer is not None and not stopped:
                writer.finish()
        wait_quietly(comm)
        # Also a barrier: no rank says that it is done before the map stands in its place.
        peaks = comm.allgather(peak_bytes([]))
    return {
        "map": wanted.out,
        "size": [window.height, window.width],
        "method": plan.method,
        "passes": len(plan.passes) + 1,
        "grid": list(plan.tiling.grid),
        "tile_own_px": max(span.own for span in (*plan.tiling.rows, *plan.tiling.cols)),
        "halo_px": plan.tiling.rule.halo_px,
        "work_ratio": plan.tiling.work_ratio,
        "stopped": stopped,
        "peak_bytes": peaks,
    }


def _how_to_go_on(wanted: Prediction) -> str:
    if wanted.resume and os.path.exists(journal_of(wanted.out)):
        return "what was done of the map is kept: the same command goes on with it"
    more = "" if wanted.resume else "; with --resume a map goes on after that"
    return f"nothing of the map is kept: the same command starts from the beginning{more}"


def _check_choices(wanted: Prediction) -> None:
    if wanted.partitions < 1:
        raise TilenetError(
            f"a network has at least one partition (partitions: {wanted.partitions}); leave "
            "--partitions out for one"
        )
    if wanted.scaled and wanted.output != "probabilities":
        raise TilenetError(
            f"only probabilities are scaled to bytes (output: {wanted.output}); leave --scaled out "
            "or add --output probabilities"
        )
    if wanted.bbox is not None and wanted.window is not None:
        raise TilenetError(
            "a part of an image is named once, by --bbox or by --window; leave one of them out"
        )


def _made_of(wanted: Prediction, job: MapJob, folder: Path, window: Window) -> dict[str, Any]:
    """All that the pixels of a map depend on, by names for people."""
    tiling, image = job.plan.tiling, job.mapper.image
    return {
        "the version of torch": torch.__version__,
        "the network": hash_of(folder / "network.json"),
        "the weights": hash_of(folder / "weights.safetensors"),
        "the image": file_facts(image.files),
        "bands": image.bands,
        "nodata": image.nodata,
        "output": [wanted.output, wanted.scaled],
        "precision": job.precision,
        "the device": job.devices[0].type,
        "the method": job.plan.method,
        "the tiles": [[astuple(span) for span in spans] for spans in (tiling.rows, tiling.cols)],
        "the part of the image": astuple(window),
    }


def _work(job: MapJob, comm: "MPI.Intracomm", sink: WritingSink, resume: MapResume | None) -> bool:
    """Compute the map; whether the ranks stopped before it was done."""
    try:
        with resume or nullcontext():
            job.map(job.fix_statistics(comm, resume), comm, sink, resume)
    except StopAgreed:
        return True
    finally:
        sink.close()
    return False


def _announce_part(plan: MapPlan, window: Window, image: Raster) -> None:
    if window == image.whole:
        return
    touched = sum(overlap(tile.own, window) is not None for tile in plan.tiling.tiles)
    say(
        f"rows {window.row} to {window.row + window.height - 1}, columns {window.col} to "
        f"{window.col + window.width - 1} of the image: {touched} of its tiles"
    )


def _announce(plan: MapPlan, record: NetworkRecord, wanted: Prediction) -> None:
    tiling = plan.tiling
    rows, cols = tiling.grid
    rule = tiling.rule
    own = f"own at most {max(s.own for s in tiling.rows)} × {max(s.own for s in tiling.cols)} px"
    if plan.method == "exchange":
        say(
            f"statistics over the whole image: one pass, since {rows} × {cols} ranks hold it, "
            f"{own}; rims travel between them"
        )
    else:
        say(
            f"{rows} × {cols} tiles, {own}, halo {rule.halo_px} px, work ratio "
            f"{tiling.work_ratio:.2f}"
        )
    if plan.method == "passes":
        say(
            f"statistics over the whole image: {len(plan.passes) + 1} passes over {rows} × {cols} "
            f"tiles, {plan.work:.1f} times the work of one pass, since {plan.why}"
        )
    if not rule.exact:
        say(
            f"approximate: the halo ({rule.halo_px} px) is not the exact one "
            f"({record.context().halo_px} px), so the map depends on the tiles"
        )
    tile_norms = [n for n in record.layers if isinstance(n, Norm) and n.scope == "tile"]
    norms = {layer.norm for layer in tile_norms}
    if norms - {"batch"}:
        say(
            f"approximate: {', '.join(sorted(norms))} norm uses the statistics of each tile, so "
            "the map depends on the tiles"
        )
