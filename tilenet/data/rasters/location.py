"""Where a file lies: on this machine, or behind an address, which GDAL asks for ranges of bytes.

Addresses go to GDAL as they are; what is set here holds where the environment says nothing else.
"""

import os
import re
from functools import lru_cache
from itertools import islice

from tilenet.data.rasters.remedies import CHECK

# Also within GDAL's longer names: ZARR:"/vsicurl/https://…":/red.
REMOTE = re.compile(r"\b(https?|ftp|s3|gs|az|adls?|oss)://|/vsi(curl|s3|gs|az|adls|oss|swift)")

# GDAL asks once unless it is told otherwise, and waits without an end. The pauses grow: 1 s, then
# about 2, 4, 8 and 16 s. A connection that cannot be made is an error at once.
for variable, value in {
    "GDAL_HTTP_MAX_RETRY": "5",
    "GDAL_HTTP_RETRY_DELAY": "1",
    "GDAL_HTTP_CONNECTTIMEOUT": "30",
    "GDAL_HTTP_LOW_SPEED_LIMIT": "1",  # bytes/s
    "GDAL_HTTP_LOW_SPEED_TIME": "30",
}.items():
    os.environ.setdefault(variable, value)

NEXT_TO_FILES, MOST_LISTED = "GDAL_DISABLE_READDIR_ON_OPEN", "GDAL_READDIR_LIMIT_ON_OPEN"
PLACES = "GDAL_GEOREF_SOURCES"
LISTED = 1000  # names of a folder, which is GDAL's own limit


def is_remote(path: str) -> bool:
    """Whether a file, or one of a stack, is read over a network by GDAL itself."""
    return REMOTE.search(path) is not None


def file_name(path: str) -> str:
    """The last part of a path; of an address without what may follow a question mark.

    A signature there is another one each hour, of the same file.
    """
    return os.path.basename(path.partition("?")[0] if is_remote(path) else path)


def real_path(path: str) -> str:
    """The file that a path leads to, through links too; an address as it is."""
    return path if is_remote(path) else os.path.realpath(path)


def looked_for(path: str, *, alone: bool, placed: bool) -> dict[str, str]:
    """GDAL's options on what it looks for when it opens a file, next to it and in it.

    Args:
        alone: Whether nothing that belongs to it lies there, as was seen when it was opened before.
        placed: Whether its CRS and transform are read, which takes longer than all else of a
            GeoTIFF; False only for one that is alone.
    """
    if not placed:
        return {NEXT_TO_FILES: "EMPTY_DIR", PLACES: "NONE"}
    remote = is_remote(path)
    if alone or (remote and NEXT_TO_FILES not in os.environ):  # it would ask for some forty names
        return {NEXT_TO_FILES: "EMPTY_DIR"}
    set_by_user = NEXT_TO_FILES in os.environ or MOST_LISTED in os.environ
    if not remote and not set_by_user and _holds_thousands(os.path.dirname(path)):
        return {NEXT_TO_FILES: "TRUE"}
    return {}


@lru_cache(maxsize=256)
def _holds_thousands(folder: str) -> bool:
    """Whether GDAL would list a folder up to its limit, and then ask for names all the same."""
    try:
        with os.scandir(folder or ".") as entries:
            return sum(1 for _ in islice(entries, LISTED + 1)) > LISTED
    except OSError:
        return False


def remedy_when_opened(path: str) -> str:
    """What to do where a file cannot be opened."""
    if is_remote(path):
        return (
            "check the address, the network, and the variables by which GDAL finds credentials "
            "(docs/remote.md)"
        )
    if os.path.exists(path):
        return (
            f"copy the file again, check it with {CHECK}, or, if rio env --formats lacks its "
            "format, convert it to GeoTIFF with a GDAL that has it, such as conda-forge's"
        )
    return "check the path"


def remedy_when_read(path: str) -> str:
    """What to do where a file that is open cannot be read."""
    if is_remote(path):
        return (
            "go on when its server answers, copy the file here, or have GDAL ask more often "
            "(GDAL_HTTP_MAX_RETRY)"
        )
    return f"copy the file again or check it with {CHECK}"
