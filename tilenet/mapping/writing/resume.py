"""The rounds of a map: they end on all ranks where one was asked to stop, or cannot write.

What is done is kept as it is written; sums of passes for statistics after their rounds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tilenet.errors import AgreedError, TilenetError
from tilenet.mapping.writing.writer import MapWriter
from tilenet.parallel.health.signals import StopAgreed, StopRequests
from tilenet.parallel.health.stop_rounds import StopRounds
from tilenet.parallel.ranks.comm import agreed

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MapResume"]


class MapResume:
    """Ends rounds while it is entered. Collective.

    Args:
        comm: All ranks that map.
    """

    def __init__(self, comm: "MPI.Intracomm", writer: MapWriter, requests: StopRequests) -> None:
        self.comm, self.writer, self._requests = comm, writer, requests
        self._failed: TilenetError | None = None

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
        if error is None or isinstance(error, StopAgreed | AgreedError):
            self._rounds.close()

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """What fails here on one rank ends the rounds of all, who then raise it together."""
        try:
            yield
        except TilenetError as error:
            self._failed = self._failed or error
            self._requests.requested = True

    def agree(self) -> None:
        """After the rounds.

        Raises:
            AgreedError: On all ranks: one failed.
        """
        with agreed(self.comm):
            if self._failed:
                raise self._failed

    def tiles_done(self, *, last: bool) -> None:
        """After a round.

        Args:
            last: Whether no round follows.

        Raises:
            StopAgreed: On all ranks, if any was asked to stop and a round follows.
        """
        if self._rounds.round_done() and not last:
            raise StopAgreed

    def sums(self, layer: int) -> tuple[int, NDArray[np.float64] | None]:
        """Of a layer's pass: number of the first tiles whose sums are known, and these sums."""
        record = self.comm.bcast(self.writer.read_sums(str(layer)) if self.comm.rank == 0 else None)
        try:
            return int(record["tiles"]), np.array(record["values"], np.float64)
        except (KeyError, ValueError, TypeError, OverflowError):  # none, or spoilt ones
            return 0, None

    def sums_done(self, layer: int, tiles: int, values: NDArray[np.float64]) -> None:
        """After a round of a layer's pass.

        Args:
            tiles: Whose sums these are, from the first on.
            values: Their sums, in whatever form the pass has them.

        Raises:
            StopAgreed: On all ranks, if any was asked to stop.
        """
        if self.comm.rank == 0:
            with self.attempt():
                record = {"tiles": tiles, "values": values.tolist()}
                self.writer.write_sums(str(layer), record)
        self.round_done()

    def round_done(self) -> None:
        """After a round of a pass of which nothing is kept.

        Raises:
            StopAgreed: On all ranks, if any was asked to stop.
        """
        if self._rounds.round_done():
            raise StopAgreed
