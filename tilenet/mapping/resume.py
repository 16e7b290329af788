"""A map that may be interrupted: what is done is kept, and not done again.

Rank 0 has the disk hold the pixels, then the journal say so; all ranks learn what it says.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tilenet.geometry.tiles import Tile, Tiling
from tilenet.geometry.windows import Window
from tilenet.mapping.journal import Done
from tilenet.mapping.writer import MapWriter
from tilenet.parallel.health.signals import StopAgreed, StopRequests, StopRounds

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MapResume"]

# To keep what is done may take this share of the time: a large map is flushed more rarely.
SHARE = 0.05


class MapResume:
    """Keeps what is done while it is entered, and ends rounds where a stop was asked. Collective.

    Args:
        comm: All ranks that map.
        tiling: Tiling of the map.
        writer: On rank 0, opened to go on; None on the others.
        requests: Requests to stop.
    """

    def __init__(
        self,
        comm: "MPI.Intracomm",
        tiling: Tiling,
        writer: MapWriter | None,
        requests: StopRequests,
    ) -> None:
        self.comm, self.writer = comm, writer
        self._numbers = {tile.own: number for number, tile in enumerate(tiling.tiles)}
        done: Done = comm.bcast(writer.done if writer else None)
        self._tiles, self._sums = done.tiles, done.sums
        self._waiting: list[int] = []
        self._kept_at, self._cost = time.monotonic(), 0.0
        self._requests = requests

    def __enter__(self) -> "MapResume":
        self._rounds = StopRounds(self.comm, self._requests)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After another error the ranks do not come here together.
        if error is None or isinstance(error, StopAgreed):
            self._rounds.close()

    def is_done(self, own: Window) -> bool:
        """Whether the tile that owns this window was done before."""
        return self._numbers[own] in self._tiles

    def tiles_done(self, tiles: Sequence[Tile], *, last: bool) -> None:
        """After a round, whose tiles rank 0 has written.

        Args:
            last: Whether no round follows.

        Raises:
            StopAgreed: On all ranks, if any was asked to stop and a round follows.
        """
        stop = self._rounds.round_done() and not last
        if self.writer is not None:
            self._waiting += [self._numbers[tile.own] for tile in tiles]
            if stop or last or self._pays():
                with self._measured():
                    self.writer.keep(self._waiting)
                self._waiting = []
        if stop:
            raise StopAgreed

    def sums(self, layer: int) -> tuple[int, NDArray[np.float64] | None]:
        """Of a layer's pass: tiles whose sums are known, from the first on, and those."""
        found = self._sums.get(str(layer), {})
        if "values" not in found:  # None, or those of tilenet before it had values of all layers
            return 0, None
        return int(found["tiles"]), np.array(found["values"], np.float64)

    def sums_done(self, layer: int, tiles: int, values: NDArray[np.float64], *, last: bool) -> None:
        """After a round of a layer's pass.

        Args:
            layer: Its number.
            tiles: Whose sums these are, from the first on.
            values: Their sums, in whatever form the pass has them.
            last: Whether these are all tiles.

        Raises:
            StopAgreed: On all ranks, if any was asked to stop.
        """
        stop = self._rounds.round_done()
        if self.writer is not None and (stop or last or self._pays()):
            with self._measured():
                self.writer.keep_sums(str(layer), {"tiles": tiles, "values": values.tolist()})
        if stop:
            raise StopAgreed

    def round_done(self) -> None:
        """After a round of a pass of which nothing is kept.

        Raises:
            StopAgreed: On all ranks, if any was asked to stop.
        """
        if self._rounds.round_done():
            raise StopAgreed

    def _pays(self) -> bool:
        return time.monotonic() - self._kept_at >= self._cost / SHARE

    @contextmanager
    def _measured(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._kept_at = time.monotonic()
        self._cost = self._kept_at - began
