"""Raster in, map out: ranks compute tiles in turn and write them, memory stays bounded.

Norms over the whole image need more than a tile: `planning.maps.choose` chooses how they get it.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tilenet.data.collars import share_collars
from tilenet.mapping.announce import announce_map
from tilenet.mapping.choose import decide_map
from tilenet.mapping.job import MapJob, Placement
from tilenet.mapping.make_map import make_map
from tilenet.mapping.map_source import MapSource
from tilenet.mapping.prediction import Prediction
from tilenet.mapping.prove import prove_map
from tilenet.mapping.turns import turn_map
from tilenet.mapping.writing.target import claim_target
from tilenet.mpi import Intracomm
from tilenet.parallel.health.peak_memory import measure_peak_bytes
from tilenet.parallel.health.signals import StopAgreed, StopRequests
from tilenet.parallel.health.watchdog import SLOW, Watchdog
from tilenet.parallel.ranks.comm import agreed, wait_quietly, world
from tilenet.parallel.ranks.devices import choose_devices, find_node_place
from tilenet.parallel.ranks.layout import say_layout
from tilenet.parallel.ranks.tf32 import say_where_no_tf32, tf32_if_asked
from tilenet.planning.balance import check_balance, likely_balance
from tilenet.storage.lock import Lock


def predict(prediction: Prediction, comm: Intracomm | None = None) -> dict[str, Any]:
    """Make a map of an image. Collective: all ranks of `comm`, None: of the job, call it.

    Returns:
        Facts on the work: tiles, their sizes, the peak resident memory of each rank in bytes, and
        whether the ranks stopped before the map was done, because one was asked to; on rank 0 the
        `values` (bands, H, W) of a map that is not written.

    Raises:
        AgreedError: On all ranks, for what any rank found wrong before the first tile.
        TilenetError: On one rank, for a file that breaks later.
    """
    comm = world() if comm is None else comm
    with ExitStack() as stack:
        with agreed(comm):
            prediction.check()
            name = f"rank {comm.rank} of {comm.size}"
            watchdog = stack.enter_context(Watchdog(prediction.hang_seconds, name))
        requests = StopRequests()
        if prediction.resume:  # from here on: MPICH catches SIGUSR1 itself, and forgets it
            stack.enter_context(requests)
        watchdog.arm("opening the checkpoint and the image", SLOW)
        place, first = find_node_place(comm, prediction.device), comm.rank == 0
        lock, folder = _begin(prediction, stack, comm)
        with agreed(comm):
            source = MapSource.open(prediction, folder, stack)
            devices = choose_devices(prediction.device, place, prediction.partitions)
        try:
            share_collars([source.image], comm, watchdog, requests)
        except StopAgreed:
            return {"map": prediction.out, "stopped": True}
        watchdog.arm("the start of the map", SLOW)
        stack.enter_context(tf32_if_asked(source.precision))
        job = _job(prediction, source, devices, place.size, watchdog, comm)
        say_layout(comm, place, devices)
        say_where_no_tf32(source.precision, devices, comm)
        if first:
            announce_map(job.plan, source, len(job.turns))
        if prediction.prove and source.record.names is not None and job.plan.method != "windows":
            watchdog.arm("the proof of the map", SLOW)
            prove_map(job, comm)
        stopped, values = make_map(prediction, job, source, requests, lock, comm)
        wait_quietly(comm)
        # Also a barrier: no rank says that it is done before the map stands in its place.
        peaks = comm.allgather(measure_peak_bytes([]))
    plan, window, tiling = job.plan, source.window, job.plan.tiling
    return {
        "map": prediction.out,
        "size": [window.height, window.width],
        "method": plan.method,
        "passes": len(plan.passes) + 1,
        "grid": list(tiling.grid),
        "tile_own_px": max(tiling.largest_own),
        "halo_px": tiling.rule.halo_px,
        "work_ratio": plan.work_ratio,
        "stopped": stopped,
        "peak_bytes": peaks,
        **({} if values is None else {"values": values}),
    }


def _begin(prediction: Prediction, stack: ExitStack, comm: Intracomm) -> tuple[Lock | None, Path]:
    """The map's lock, on rank 0, and the checkpoint that all ranks read. Collective."""
    lock, folder = None, Path()
    with agreed(comm):
        if comm.rank == 0:
            if prediction.out is not None:
                out, image = prediction.out, prediction.image
                lock = claim_target(out, image, stack, overwrite=prediction.overwrite)
            # One rank reads all bytes and compares them; none continues where they are wrong.
            folder = prediction.checkpoint()
    return lock, comm.bcast(folder)


def _job(
    prediction: Prediction,
    source: MapSource,
    devices: Sequence[torch.device],
    ranks_of_node: int,
    watchdog: Watchdog,
    comm: Intracomm,
) -> MapJob:
    """Decide how the image is mapped, and which of its blocks stay in memory. Collective."""
    record = source.record
    # A narrow map would show little of the rows that a sweep computes.
    sweeps = prediction.partitions == 1 and not prediction.tta
    sweeps &= 2 * source.window.width >= source.image.width
    plan = decide_map(source.question(prediction), record.opaque, devices[0], comm, sweeps=sweeps)
    if plan.method == "sweep":
        source.image.keep_block_rows(plan.tiling.largest_read[0], ranks_of_node)
    read = plan.tiling.tiles[0].read
    with agreed(comm):
        size = read.height, read.width
        balance = prediction.balance or likely_balance(record.layers, size, prediction.partitions)
        check_balance(balance, len(record.layers), prediction.partitions)
    mapper = source.mapper(plan.tiling, prediction)
    return MapJob(
        plan,
        mapper,
        source.network,
        Placement(tuple(balance), tuple(devices), source.precision),
        watchdog,
        what=os.path.basename(source.image.files[0]),
        turns=turn_map(plan, mapper, prediction.tta),
    )
