"""Stage what the ranks of a node read on the node's own disk, as long as a run lasts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tilenet.errors import AgreedError
from tilenet.files.label_source import LabelSource
from tilenet.files.raster import Raster
from tilenet.files.staging_folder import StagingFolder
from tilenet.parallel.mesh import agreed
from tilenet.parallel.progress import say

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["staged_on_node"]


@contextmanager
def staged_on_node(
    cache_dir: str,
    images: Sequence[Raster],
    labels: Sequence[LabelSource],
    comm: "MPI.Intracomm",
) -> Iterator[None]:
    """Have images and labels read by way of a folder in `cache_dir`. Collective, at its end too.

    An error that only one rank raises ends the job, so then that rank removes its node's folder
    and waits for nobody; what the others read is not there any more and comes from its files.

    Raises:
        AgreedError: On some node the folder cannot be made.
    """
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    folder: StagingFolder | None = None
    together = False
    sources: list[Raster | LabelSource] = [*images, *labels]

    def warn(sentence: str) -> None:
        say(f"rank {comm.rank} of {comm.size}: {sentence}")

    try:
        with agreed(comm):
            if node.rank == 0:
                folder = StagingFolder.make(Path(cache_dir), warn)
        path = node.bcast(folder.path if folder else None)
        with agreed(comm):
            folder = folder or StagingFolder(path, warn)
            for source in sources:
                source.stage_in(folder)
        yield
        together = True
    except AgreedError:
        together = True
        raise
    finally:
        for source in sources:
            source.staged = None
        if together:
            node.Barrier()
        if folder is not None:
            if node.rank == 0 or not together:
                folder.remove()
            folder.close()
        if together:
            node.Free()
