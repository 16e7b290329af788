"""A map computed to its end: written to its file, or kept by rank 0 in memory."""

from typing import Any

from numpy.typing import NDArray

from tilenet.mapping.job import MapJob
from tilenet.mapping.map_source import MapSource
from tilenet.mapping.memory_sink import MemorySink
from tilenet.mapping.prediction import Prediction
from tilenet.mapping.writing.resume import MapResume
from tilenet.mapping.writing.writer import MapWriter
from tilenet.mapping.writing_sink import WritingSink
from tilenet.mpi import Intracomm
from tilenet.parallel.health.progress import say
from tilenet.parallel.health.signals import StopAgreed, StopRequests
from tilenet.parallel.health.watchdog import SLOW
from tilenet.parallel.ranks.comm import agreed
from tilenet.storage.lock import Lock


def make_map(
    prediction: Prediction,
    job: MapJob,
    source: MapSource,
    requests: StopRequests,
    lock: Lock | None,
    comm: Intracomm,
) -> tuple[bool, NDArray[Any] | None]:
    """Compute and write the map. Collective.

    Returns:
        Whether the ranks stopped before it was done; the map, where rank 0 keeps it.
    """
    plan, mapper, tiling = job.plan, job.mapper, job.plan.tiling
    # One pass over windows that ranks hold at once has nothing to resume.
    resumes = prediction.resume and plan.method != "exchange"
    if prediction.resume and not resumes:
        requests.release()
        if comm.rank == 0:
            say("a map in one pass over shares of the ranks is not interrupted: it starts over")
    if prediction.out is None:
        sink = MemorySink(mapper, comm, source.window, source.check_finite)
        job.map(job.fix_statistics(comm), comm, sink)
        sink.close()
        return False, sink.values
    with agreed(comm):
        made_of = None
        if resumes and comm.rank == 0:
            made_of = source.made_of(
                tiling,
                plan.method,
                job.placement.devices[0].type,
                scaled=prediction.scaled,
                tta=prediction.tta,
            )
    # Opened before the work: a map that cannot be written is refused before hours have passed.
    with MapWriter(
        prediction.out, source.image, mapper.kind, source.window, made_of, lock, comm
    ) as writer:
        if writer.why_restarted and comm.rank == 0:
            say(f"the map starts over, since what was done of it is {writer.why_restarted}")
        stopped = _write_map(job, comm, writer, source, requests, resumes=resumes)
        if not stopped:
            # Compressing it takes as many rounds of tiles as it has, at the most.
            job.watchdog.arm("the finished map", SLOW + len(tiling.tiles) / comm.size)
            writer.finish()
    return stopped, None


def _write_map(
    job: MapJob,
    comm: Intracomm,
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
