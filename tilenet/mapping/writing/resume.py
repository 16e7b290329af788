"""End the rounds of a map on all ranks if a stop is requested on one, or one cannot write.

Finished tiles are on disk already; the sums of a pass for statistics are written after each round.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from tilenet.errors import AgreedError, TilenetError
from tilenet.mapping.writing.writer import MapWriter
from tilenet.mpi import Intracomm, Request
from tilenet.parallel.health.signals import StopAgreed, StopRequests
from tilenet.parallel.ranks.comm import agreed


class MapResume:
    """Context manager that can end the rounds of a map early on all ranks. Collective.

    The sum at a round's end was begun with the round: so a rank waits for others to begin the
    round, not to end it, and may be ahead of them.

    Args:
        comm: All ranks that map.
        writer: Writer of the map, which stores the sums of passes too.
        requests: Requests to stop.
    """

    def __init__(self, comm: Intracomm, writer: MapWriter, requests: StopRequests) -> None:
        self.comm, self.writer, self._requests = comm, writer, requests
        self._failed: TilenetError | None = None
        self._own, self._sum = np.zeros(1, np.int32), np.zeros(1, np.int32)

    def __enter__(self) -> "MapResume":
        self._reduction = self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After another error this rank is alone here, and closing is collective.
        if error is None or isinstance(error, StopAgreed | AgreedError):
            self._reduction.Wait()

    def _begin(self) -> Request:
        self._own[0] = self._requests.requested
        return self.comm.Iallreduce(self._own, self._sum)

    def _stops(self) -> bool:
        """Whether any rank was asked to stop before this round began; begin the next one."""
        self._reduction.Wait()
        self._requests.agreed = self._requests.agreed or bool(self._sum[0])
        self._reduction = self._begin()
        return self._requests.agreed

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """End the rounds of all ranks on an error in the context; `agree` raises it there."""
        try:
            yield
        except TilenetError as error:
            self._failed = self._failed or error
            self._requests.requested = True

    def agree(self) -> None:
        """Raise an error of `attempt` on all ranks, after the rounds.

        Raises:
            AgreedError: On all ranks: an attempt failed on one of them.
        """
        with agreed(self.comm):
            if self._failed:
                raise self._failed

    def tiles_done(self, *, last: bool) -> None:
        """Count a finished round of tiles, and stop if that is requested and a round follows.

        Args:
            last: Whether no round follows.

        Raises:
            StopAgreed: On all ranks, if a stop is requested on any and a round follows.
        """
        if self._stops() and not last:
            raise StopAgreed

    def sums(self, layer: int) -> tuple[int, NDArray[np.float64] | None]:
        """The sums of a layer's pass that were written: number of their tiles, and the values.

        Returns:
            0 and None where no sums can be read.
        """
        record = self.comm.bcast(self.writer.read_sums(str(layer)) if self.comm.rank == 0 else None)
        try:
            return int(record["tiles"]), np.array(record["values"], np.float64)
        except (KeyError, ValueError, TypeError, OverflowError):  # missing or corrupt
            return 0, None

    def sums_done(self, layer: int, tiles: int, values: NDArray[np.float64]) -> None:
        """Write the sums of a layer's pass after a round, and stop if that is requested.

        Args:
            tiles: Number of tiles that are in the sums, counted from the first.
            values: The sums, in an array of any shape.

        Raises:
            StopAgreed: On all ranks, if a stop is requested on any.
        """
        if self.comm.rank == 0:
            with self.attempt():
                record = {"tiles": tiles, "values": values.tolist()}
                self.writer.write_sums(str(layer), record)
        self.round_done()

    def round_done(self) -> None:
        """Count a finished round of a pass, and stop if that is requested.

        Raises:
            StopAgreed: On all ranks, if a stop is requested on any.
        """
        if self._stops():
            raise StopAgreed
