"""Read again what did not come over a network.

GDAL itself asks again where a server says that it is busy (429, 500, 502, 503, 504), and where it
resets the connection; not where an answer ends too early.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from tilenet.data.rasters.location import is_remote
from tilenet.data.rasters.opening import GDAL_ERRORS

__all__ = ["PAUSES_S", "read_from"]

PAUSES_S = (1.0, 2.0, 4.0)

Values = TypeVar("Values")


def read_from(path: str, read: Callable[[], Values]) -> Values:
    """The result of `read`, which is called up to four times for a remote file.

    Blocks that came are in GDAL's cache, so that each time gets further.

    Raises:
        GDAL_ERRORS: It fails, the last time too.
    """
    for pause_s in PAUSES_S if is_remote(path) else ():
        with suppress(*GDAL_ERRORS):
            return read()
        time.sleep(pause_s)
    return read()
