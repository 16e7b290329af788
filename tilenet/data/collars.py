"""Find the black collars of images together: each rank looks at its share of the strips."""

from collections.abc import Sequence
from itertools import islice

from tilenet.data.rasters.collar import Collar, Runs
from tilenet.data.rasters.raster import Raster
from tilenet.mpi import Intracomm
from tilenet.parallel.health.signals import StopRequests
from tilenet.parallel.health.watchdog import NEVER, Watchdog
from tilenet.parallel.ranks.together import together


def share_collars(
    images: Sequence[Raster],
    comm: Intracomm,
    watchdog: Watchdog = NEVER,
    requests: StopRequests | None = None,
) -> None:
    """Give each image its collar, where `nodata` is collar. Collective.

    Reading all pixels takes long, so ranks share it; strips do not depend on the number of ranks,
    and each rank links the runs of all of them.

    Args:
        watchdog: Armed for each strip.
        requests: Requests to stop.

    Raises:
        AgreedError: A file cannot be read.
        StopAgreed: A rank was asked to stop.
    """
    collared = [image for image in images if image.nodata == "collar"]
    if not collared:
        return
    each = [image.collar_strips for image in collared]
    work = [(image, s) for image, strips in zip(collared, each, strict=True) for s in strips]
    mine: list[Runs] = []
    with together(comm, requests) as turns:
        share = work[comm.rank :: comm.size]
        for part, (image, strip) in enumerate(share):
            watchdog.arm_part("the collar of an image", part, len(share))
            mine.append(image.collar_runs(strip, turns.part_done))
        watchdog.arm_others("the collar of an image", len(work) / comm.size)
    shares = [iter(runs) for runs in comm.allgather(mine)]
    parts = (next(shares[number % comm.size]) for number in range(len(work)))
    for image, strips in zip(collared, each, strict=True):
        image.collar = Collar(list(islice(parts, len(strips))), image.size_in_file)
