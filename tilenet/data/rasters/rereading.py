"""Read windows of files, of remote ones again where the transfer failed.

GDAL itself repeats a request where a server says that it is busy (429, 500, 502, 503, 504), and
where it resets the connection. Where an answer ends too early, GDAL caches what came, as if the
file ended there, for all that open the file later.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import rasterio
from rasterio.windows import Window as FileWindow

from tilenet.data.rasters.location import is_remote, remedy_when_read
from tilenet.data.rasters.opening import GDAL_ERRORS, opened, reason
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window

PAUSES_S = (1.0, 2.0, 4.0)

REMOTE = "/vsicurl/:/vsis3/:/vsigs/:/vsiaz/:/vsiadls/:/vsioss/:/vsiswift/"

Values = TypeVar("Values")


def read_window(
    path: str, window: Window, read: Callable[[FileWindow], Values], grid: str | None = None
) -> Values:
    """Return what `read` gives of rasterio's window; for a remote file it is called up to 4 times.

    Decoded blocks stay in GDAL's memory, so that each attempt gets further.

    Args:
        grid: Name of the grid that the window is of; None: the file's own.

    Raises:
        TilenetError: The last attempt failed too.
    """
    place = FileWindow(window.col, window.row, window.width, window.height)
    for pause_s in PAUSES_S if is_remote(path) else ():
        with suppress(*GDAL_ERRORS):
            return read(place)
        time.sleep(pause_s)
        _forget(path)
    try:
        return read(place)
    except GDAL_ERRORS as error:
        where = (
            f"rows {window.row} to {window.row + window.height - 1}, columns {window.col} to "
            f"{window.col + window.width - 1}"
        )
        if grid is not None:
            where = f"what lies under {where} of {grid}"
        raise TilenetError(
            f"a raster must be readable everywhere ({path}: {where} cannot be read: "
            f"{reason(error)}); {remedy_when_read(path)}"
        ) from error


def _forget(path: str) -> None:
    """Have GDAL drop what it caches of a file, as it does when it closes a non-cached one."""
    with suppress(TilenetError), rasterio.Env.from_defaults(CPL_VSIL_CURL_NON_CACHED=REMOTE):
        opened(path).close()
