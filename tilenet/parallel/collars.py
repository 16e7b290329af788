"""Find the black collars of images together: each rank looks at its share of the strips."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilenet.files.collar import Collar, Runs
from tilenet.files.raster import Raster
from tilenet.parallel.mesh import agreed

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["share_collars"]


def share_collars(images: Sequence[Raster], comm: "MPI.Intracomm") -> None:
    """Give each image its collar, where `nodata` is collar. Collective.

    Reading all pixels is what takes long, so ranks share it; strips do not depend on their number,
    and each rank links the runs of all of them.

    Raises:
        AgreedError: A file cannot be read.
    """
    for image in images:
        if image.nodata != "collar":
            continue
        strips = image.collar_strips
        mine: dict[int, Runs] = {}
        with agreed(comm):
            for number in range(comm.rank, len(strips), comm.size):
                mine[number] = image.collar_runs(strips[number])
        found: dict[int, Runs] = {}
        for part in comm.allgather(mine):
            found.update(part)
        image.collar = Collar([found[number] for number in range(len(strips))], image.size_in_file)
