"""Find the black collars of images together: each rank looks at its share of the strips."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilenet.files.collar import Collar, Runs
from tilenet.files.raster import Raster
from tilenet.parallel.signals import StopRequests
from tilenet.parallel.together import together
from tilenet.parallel.watchdog import NEVER, Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["share_collars"]


def share_collars(
    images: Sequence[Raster],
    comm: "MPI.Intracomm",
    watchdog: Watchdog = NEVER,
    requests: StopRequests | None = None,
) -> None:
    """Give each image its collar, where `nodata` is collar. Collective.

    Reading all pixels is what takes long, so ranks share it; strips do not depend on their number,
    and each rank links the runs of all of them.

    Args:
        watchdog: Armed for each strip.
        requests: To stop.

    Raises:
        AgreedError: A file cannot be read.
        StopAgreed: A rank was asked to stop.
    """
    for image in images:
        if image.nodata != "collar":
            continue
        strips = image.collar_strips
        mine: dict[int, Runs] = {}
        with together(comm, requests) as turns:
            share = range(comm.rank, len(strips), comm.size)
            for part, number in enumerate(share):
                watchdog.arm_part("the collar of an image", part, len(share))
                mine[number] = image.collar_runs(strips[number], turns.part_done)
            watchdog.arm_others("the collar of an image", len(strips) / comm.size)
        found: dict[int, Runs] = {}
        for others in comm.allgather(mine):
            found.update(others)
        image.collar = Collar([found[number] for number in range(len(strips))], image.size_in_file)
