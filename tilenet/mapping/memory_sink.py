"""A map that stays in memory: the ranks send their pieces to rank 0."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilenet.geometry.tiles import Tile, owned
from tilenet.geometry.windows import Window, overlap
from tilenet.mapping.mapper import Computed, Mapper
from tilenet.mpi import Intracomm, Request


class MemorySink:
    """Has rank 0 keep the map's values, which it takes up in order; the others send them.

    Args:
        window: Pixels of the image that the map shows.
        check: Called with each piece on the rank that computed it.

    Attributes:
        values: The map, (bands, H, W); None on ranks but 0.
    """

    def __init__(
        self,
        mapper: Mapper,
        comm: Intracomm,
        window: Window,
        check: Callable[[Window, Computed], None],
    ) -> None:
        self.mapper, self.comm, self.window, self.check = mapper, comm, window, check
        self.values: NDArray[Any] | None = None
        if comm.rank == 0:
            size = mapper.kind.bands, window.height, window.width
            self.values = np.full(size, mapper.kind.nodata, mapper.kind.dtype)
        self._sent: tuple[Request, NDArray[Any]] | None = None

    def wants(self, rank: int, window: Window) -> bool:
        """Rank 0 has to do with all pieces that the map shows, the others with their own."""
        return self.comm.rank in (0, rank) and overlap(window, self.window) is not None

    def take(self, rank: int, window: Window, computed: Computed | None) -> None:
        """Keep a piece, or send it."""
        if computed is None:
            kind = self.mapper.kind
            values = np.empty((kind.bands, window.height, window.width), kind.dtype)
            self.comm.Recv(values, source=rank, tag=0)
        else:
            self.check(window, computed)
            values = self.mapper.values(computed)
        if self.values is None:
            # While rank 0 still computes, this rank goes on with its next piece.
            self.close()
            self._sent = self.comm.Isend(values, dest=0, tag=0), values
            return
        part = overlap(window, self.window)
        assert part is not None, "what the map shows was asked for"
        owned(self.values, Tile(self.window, part))[:] = owned(values, Tile(window, part))

    def close(self) -> None:
        """Return when rank 0 has all that this rank sent."""
        if self._sent is not None:
            self._sent[0].Wait()
            self._sent = None
