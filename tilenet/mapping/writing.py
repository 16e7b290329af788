"""Pieces of a map on their way to rank 0, which writes them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tilenet.geometry.windows import Window, overlap
from tilenet.mapping.in_memory import MapInMemory
from tilenet.mapping.mapper import Computed, Mapper
from tilenet.mapping.resume import MapResume
from tilenet.mapping.writer import MapWriter

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["WritingSink"]


class WritingSink:
    """Has rank 0 write the map's values, in order; the others send them.

    Args:
        writer: On rank 0.
        window: What the map shows of the image.
        check: Called with each piece on the rank that computed it, before it is written or sent.
        resume: Knows tiles that are done.
    """

    def __init__(
        self,
        mapper: Mapper,
        comm: "MPI.Intracomm",
        writer: MapWriter | MapInMemory | None,
        window: Window,
        check: Callable[[Window, Computed], None],
        resume: MapResume | None = None,
    ) -> None:
        self.mapper, self.comm, self.writer = mapper, comm, writer
        self.window, self.check, self.resume = window, check, resume
        self._sent: tuple[MPI.Request, NDArray[Any]] | None = None

    def wants(self, rank: int, window: Window) -> bool:
        """Rank 0 has to do with all pieces that the map shows, the others with their own."""
        if self.comm.rank not in (0, rank) or overlap(window, self.window) is None:
            return False
        return self.resume is None or not self.resume.is_done(window)

    def take(self, rank: int, window: Window, computed: Computed | None) -> None:
        """Write a piece, or send it."""
        if computed is None:
            kind = self.mapper.kind
            values = np.empty((kind.bands, window.height, window.width), kind.dtype)
            self.comm.Recv(values, source=rank, tag=0)
        else:
            self.check(window, computed)
            values = self.mapper.values(computed)
        if self.writer is None:
            # While rank 0 still computes or writes, this rank goes on with its next piece.
            self.close()
            self._sent = self.comm.Isend(values, dest=0, tag=0), values
        else:
            self.writer.write(window, values)

    def close(self) -> None:
        """Return when rank 0 has all that this rank sent."""
        if self._sent is not None:
            self._sent[0].Wait()
            self._sent = None
