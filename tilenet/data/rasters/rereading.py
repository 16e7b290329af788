"""Read again what did not come over a network.

GDAL itself asks again where a server says that it is busy (429, 500, 502, 503, 504), and where it
resets the connection. Where an answer ends too early GDAL keeps what came, as if the file ended
there, for all that open the file later.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import rasterio

from tilenet.data.rasters.location import is_remote
from tilenet.data.rasters.opening import GDAL_ERRORS, opened
from tilenet.errors import TilenetError

__all__ = ["PAUSES_S", "read_from"]

PAUSES_S = (1.0, 2.0, 4.0)

KEPT = "/vsicurl/:/vsis3/:/vsigs/:/vsiaz/:/vsiadls/:/vsioss/:/vsiswift/"

Values = TypeVar("Values")


def read_from(path: str, read: Callable[[], Values]) -> Values:
    """The result of `read`, which is called up to four times for a remote file.

    Blocks that were decoded stay in memory, so that each time gets further.

    Raises:
        GDAL_ERRORS: It fails, the last time too.
    """
    for pause_s in PAUSES_S if is_remote(path) else ():
        with suppress(*GDAL_ERRORS):
            return read()
        time.sleep(pause_s)
        _forget(path)
    return read()


def _forget(path: str) -> None:
    """Have GDAL drop what it keeps of a file: it does when a file is closed that was opened so."""
    with suppress(TilenetError), rasterio.Env.from_defaults(CPL_VSIL_CURL_NON_CACHED=KEPT):
        opened(path).close()
