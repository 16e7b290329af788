"""Read a remote file again where the transfer failed.

GDAL itself repeats a request where a server says that it is busy (429, 500, 502, 503, 504), and
where it resets the connection. Where an answer ends too early, GDAL caches what came, as if the
file ended there, for all that open the file later.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import rasterio

from tilenet.data.rasters.location import is_remote
from tilenet.data.rasters.opening import GDAL_ERRORS, opened
from tilenet.errors import TilenetError

PAUSES_S = (1.0, 2.0, 4.0)

REMOTE = "/vsicurl/:/vsis3/:/vsigs/:/vsiaz/:/vsiadls/:/vsioss/:/vsiswift/"

Values = TypeVar("Values")


def read_from(path: str, read: Callable[[], Values]) -> Values:
    """Return the result of `read`, which is called up to four times for a remote file.

    Decoded blocks stay in GDAL's memory, so that each attempt gets further.

    Raises:
        GDAL_ERRORS: The last attempt failed too.
    """
    for pause_s in PAUSES_S if is_remote(path) else ():
        with suppress(*GDAL_ERRORS):
            return read()
        time.sleep(pause_s)
        _forget(path)
    return read()


def _forget(path: str) -> None:
    """Have GDAL drop what it caches of a file, as it does when it closes a non-cached one."""
    with suppress(TilenetError), rasterio.Env.from_defaults(CPL_VSIL_CURL_NON_CACHED=REMOTE):
        opened(path).close()
