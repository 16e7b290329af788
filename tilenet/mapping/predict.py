"""Raster in, map out: ranks compute tiles in turn and write them, memory stays bounded.

Norms over the whole image need more than a tile: `planning.maps` chooses how they get it.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray

from tilenet.data.collars import share_collars
from tilenet.mapping.announce import announce_map
from tilenet.mapping.choose import decide_map
from tilenet.mapping.in_memory import MapInMemory
from tilenet.mapping.job import MapJob, Placement
from tilenet.mapping.prediction import MapSource, Prediction
from tilenet.mapping.prove import prove_map
from tilenet.mapping.resume import MapResume
from tilenet.mapping.turns import turn_map
from tilenet.mapping.writer import MapWriter, check_target, map_lock
from tilenet.mapping.writing import WritingSink
from tilenet.parallel.health.peak_memory import measure_peak_bytes
from tilenet.parallel.health.progress import say
from tilenet.parallel.health.signals import StopAgreed, StopRequests
from tilenet.parallel.health.watchdog import SLOW, Watchdog
from tilenet.parallel.ranks.comm import agreed, wait_quietly, world
from tilenet.parallel.ranks.devices import choose_devices, find_node_place
from tilenet.parallel.ranks.layout import say_layout
from tilenet.parallel.ranks.tf32 import say_where_no_tf32, tf32_if_asked
from tilenet.planning.balance import check_balance, likely_balance
from tilenet.storage.lock import Lock

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Prediction", "predict"]


def predict(wanted: Prediction, comm: "MPI.Intracomm | None" = None) -> dict[str, Any]:
    """Make a map of an image. Collective: all ranks of `comm`, None: of the job, call it.

    Returns:
        What was done: tiles, their sizes, the peak resident memory of each rank in bytes, and
        whether the ranks stopped before the map was done, because one was asked to; on rank 0 the
        `values` (bands, H, W) of a map that is not written.

    Raises:
        AgreedError: On all ranks, for what any rank found wrong before the first tile.
        TilenetError: On one rank, for a file that breaks later.
    """
    comm = world() if comm is None else comm
    with ExitStack() as stack:
        with agreed(comm):
            wanted.check()
            name = f"rank {comm.rank} of {comm.size}"
            watchdog = stack.enter_context(Watchdog(wanted.hang_seconds, name))
        requests = StopRequests()
        if wanted.resume:  # from here on: MPICH catches SIGUSR1 itself, and forgets it
            stack.enter_context(requests)
        watchdog.arm("opening the checkpoint and the image", SLOW)
        place, first = find_node_place(comm, wanted.device), comm.rank == 0
        lock, folder = _begin(wanted, stack, comm)
        with agreed(comm):
            source = MapSource.open(wanted, folder, stack)
            devices = choose_devices(wanted.device, place, wanted.partitions)
        try:
            share_collars([source.image], comm, watchdog, requests)
        except StopAgreed:
            return {"map": wanted.out, "stopped": True}
        watchdog.arm("the start of the map", SLOW)
        stack.enter_context(tf32_if_asked(source.precision))
        job = _job(wanted, source, devices, watchdog, comm)
        say_layout(comm, place, devices)
        say_where_no_tf32(source.precision, devices, comm)
        if first:
            announce_map(job.plan, source, len(job.turns))
        if wanted.prove and source.record.names is not None and job.plan.method != "windows":
            watchdog.arm("the proof of the map", SLOW)
            prove_map(job, comm)
        stopped, values = _make(wanted, job, source, requests, lock, comm)
        wait_quietly(comm)
        # Also a barrier: no rank says that it is done before the map stands in its place.
        peaks = comm.allgather(measure_peak_bytes([]))
    plan, window, tiling = job.plan, source.window, job.plan.tiling
    return {
        "map": wanted.out,
        "size": [window.height, window.width],
        "method": plan.method,
        "passes": len(plan.passes) + 1,
        "grid": list(tiling.grid),
        "tile_own_px": max(span.own for span in (*tiling.rows, *tiling.cols)),
        "halo_px": tiling.rule.halo_px,
        "work_ratio": plan.work_ratio,
        "stopped": stopped,
        "peak_bytes": peaks,
        **({} if values is None else {"values": values}),
    }


def _begin(wanted: Prediction, stack: ExitStack, comm: "MPI.Intracomm") -> tuple[Lock | None, Path]:
    """The map's lock, on rank 0, and the checkpoint that all ranks read. Collective."""
    lock, folder = None, Path()
    with agreed(comm):
        if comm.rank == 0:
            if wanted.out is not None:
                lock = _claim(wanted, wanted.out, stack)
            # One rank reads all bytes and compares them; none continues where they are wrong.
            folder = wanted.checkpoint()
    return lock, comm.bcast(folder)


def _claim(wanted: Prediction, out: str, stack: ExitStack) -> Lock:
    """Lock the map; `stack` releases it.

    Raises:
        TilenetError: It is there already, or cannot be written.
    """
    check_target(out, overwrite=wanted.overwrite, image=wanted.image)
    lock: Lock = stack.enter_context(map_lock(out))
    # Once more: another job may have made the map while this one waited for the lock.
    check_target(out, overwrite=wanted.overwrite, image=wanted.image)
    return lock


def _job(
    wanted: Prediction,
    source: MapSource,
    devices: Sequence[torch.device],
    watchdog: Watchdog,
    comm: "MPI.Intracomm",
) -> MapJob:
    """Decide how the image is mapped. Collective."""
    record = source.record
    # A narrow map would show little of the rows that a sweep computes.
    sweeps = wanted.partitions == 1 and not wanted.tta
    sweeps &= 2 * source.window.width >= source.image.width
    plan = decide_map(source.question(wanted), record.opaque, devices[0], comm, sweeps=sweeps)
    read = plan.tiling.tiles[0].read
    with agreed(comm):
        size = read.height, read.width
        balance = wanted.balance or likely_balance(record.layers, size, wanted.partitions)
        check_balance(balance, len(record.layers), wanted.partitions)
    mapper = source.mapper(plan.tiling, wanted)
    return MapJob(
        plan,
        mapper,
        source.network,
        Placement(tuple(balance), tuple(devices), source.precision),
        watchdog,
        what=os.path.basename(source.image.files[0]),
        turns=turn_map(plan, mapper, wanted.tta),
    )


def _make(
    wanted: Prediction,
    job: MapJob,
    source: MapSource,
    requests: StopRequests,
    lock: Lock | None,
    comm: "MPI.Intracomm",
) -> tuple[bool, NDArray[Any] | None]:
    """Compute and write the map. Collective.

    Returns:
        Whether the ranks stopped before it was done; the map, where rank 0 keeps it.
    """
    plan, mapper, tiling = job.plan, job.mapper, job.plan.tiling
    # One pass over windows that ranks hold at once has nothing to resume.
    resumes = wanted.resume and plan.method != "exchange"
    if wanted.resume and not resumes:
        requests.release()
        if comm.rank == 0:
            say("a map in one pass over shares of the ranks is not interrupted: it starts over")
    if wanted.out is None:
        kept = MapInMemory(mapper, comm, source.window, source.check_finite)
        job.map(job.fix_statistics(comm), comm, kept)
        kept.close()
        return False, kept.values
    with agreed(comm):
        made_of = None
        if resumes and comm.rank == 0:
            how = tiling, plan.method, job.placement.devices[0].type
            made_of = source.made_of(*how, scaled=wanted.scaled, tta=wanted.tta)
    # Opened before the work: what cannot be written is known before hours have passed.
    with MapWriter(
        wanted.out, source.image, mapper.kind, source.window, made_of, lock, comm
    ) as writer:
        if writer.why_anew and comm.rank == 0:
            say(f"the map starts over, since what was done of it is {writer.why_anew}")
        stopped = _work(job, comm, writer, source, requests, resumes=resumes)
        if not stopped:
            # Compressing it takes as many rounds of tiles as it has, at the most.
            job.watchdog.arm("the finished map", SLOW + len(tiling.tiles) / comm.size)
            writer.finish()
    return stopped, None


def _work(
    job: MapJob,
    comm: "MPI.Intracomm",
    writer: MapWriter,
    source: MapSource,
    requests: StopRequests,
    *,
    resumes: bool,
) -> bool:
    """Compute the map; whether the ranks stopped before it was done."""
    stopped, resume = False, MapResume(comm, writer, requests)
    sink = WritingSink(job.mapper, writer, source.check_finite, resume)
    try:
        with resume:
            job.map(job.fix_statistics(comm, resume if resumes else None), comm, sink, resume)
    except StopAgreed:
        stopped = True
    resume.agree()
    return stopped
