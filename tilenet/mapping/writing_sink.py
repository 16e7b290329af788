"""Pieces of a map on their way to its folder: each rank writes its own."""

from collections.abc import Callable

from tilenet.geometry.windows import Window
from tilenet.mapping.mapper import Computed, Mapper
from tilenet.mapping.writing.resume import MapResume
from tilenet.mapping.writing.writer import MapWriter


class WritingSink:
    """Writes the values of the pieces that this rank computes.

    Args:
        writer: Writer of the map.
        check: Called with each piece before it is written.
        resume: Ends the work of all ranks where this one cannot write.
    """

    def __init__(
        self,
        mapper: Mapper,
        writer: MapWriter,
        check: Callable[[Window, Computed], None],
        resume: MapResume,
    ) -> None:
        self.mapper, self.writer, self.check, self.resume = mapper, writer, check, resume

    def wants(self, rank: int, window: Window) -> bool:
        """Each rank has to do with its own pieces that are not done."""
        return rank == self.writer.comm.rank and self.writer.lacks(window)

    def take(self, rank: int, window: Window, computed: Computed | None) -> None:
        """Write a piece."""
        assert computed is not None, "ranks take up what they computed"
        with self.resume.attempt():
            self.check(window, computed)
            self.writer.write(window, self.mapper.values(computed))
