"""The rasters that a rank holds open: a bounded number of any number in a run.

A process may open a thousand files or so, and an open one takes 50 kB; what a raster's header says
is kept without it.

Where there are more, those that were read last stay open, and those that were opened first: all
rasters are gone through in one order again and again (headers, survey, validation), and of those
that were read last none would be open when its turn comes again.
"""

import resource
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import islice
from typing import Any, Protocol, TypeVar

from tilenet.data.rasters.remedies import JOIN
from tilenet.errors import TilenetError

# GDAL's handles serve one thread at a time, and labels share a cache: readers take turns.
READING = threading.RLock()

MOST_OPEN = 256  # rasters, each of one file or of those of a stack
LATEST = 64  # of them, that were read last
OTHER_FILES = 64  # libraries, sockets, logs


def allow_open_files(count: int) -> None:
    """Raise this process's limit where it is below what `count` open files need.

    Raises:
        TilenetError: The system's own limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    if hard != endless and hard < count + OTHER_FILES:
        raise TilenetError(
            f"a rank holds up to {MOST_OPEN} images and labels open (files: {count}, the system "
            f"allows: {hard}); raise ulimit -Hn, or join images into fewer files with {JOIN}"
        )
    needed = 4 * count + OTHER_FILES  # a file may be opened several times over
    if soft != endless and soft < needed:
        limit = needed if hard == endless else min(needed, hard)
        with suppress(OSError, ValueError):  # macOS has a lower limit than it names
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


class View(Protocol):
    """A view of files, which is closed before them."""

    def close(self) -> None:
        """Close it."""


Viewed = TypeVar("Viewed", bound=View)


class Handles:
    """The open files of a raster: closed where too many are open, and opened again when needed.

    Pickled it is closed.

    Args:
        open_all: Function that opens its files; it is told whether they are `alone`, and `placed`.

    Attributes:
        alone: Whether nothing belongs to the files that lies next to them, for which GDAL would
            read the whole folder whenever it opens one, or ask for fifty names.
        placed: Whether they are opened with their CRS and transform. Views need both: once one is
            made they are.
    """

    def __init__(self, path: str, open_all: Callable[[str, bool, bool], list[Any]]) -> None:
        self._path, self._open_all = path, open_all
        self.alone, self.placed = False, True
        self._opened_placed = True
        self._files: list[Any] = []
        self._views: dict[object, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Handles, (self._path, self._open_all), {"alone": self.alone, "placed": self.placed}

    @property
    def files(self) -> list[Any]:
        """rasterio's, open until those of `LATEST` other rasters were asked for, or longer.

        Raises:
            TilenetError: One is gone, or cannot be opened any more.
        """
        with READING:
            if not self._files:
                self._files = self._open_all(self._path, self.alone, self.placed)
                self._opened_placed = self.placed
            RECENT[self] = None
            RECENT.move_to_end(self)
            while len(RECENT) > MOST_OPEN:
                next(islice(reversed(RECENT), min(LATEST, MOST_OPEN), None)).close()
            return self._files

    def view(self, key: object, make: Callable[[list[Any]], Viewed]) -> Viewed:
        """The result of `make` for the open files, kept by its key as long as they are open."""
        with READING:
            self.placed = True
            if not self._opened_placed:
                self.close()
            files = self.files
            if key not in self._views:
                self._views[key] = make(files)
            view: Viewed = self._views[key]
            return view

    def close(self) -> None:
        """Close the files, and before them their views."""
        with READING, ExitStack() as stack:
            RECENT.pop(self, None)
            for opened in (*self._files, *self._views.values()):
                stack.callback(opened.close)
            self._files, self._views = [], {}


RECENT: "OrderedDict[Handles, None]" = OrderedDict()  # of this process, the last asked for last
