"""Whether the pixels that an interrupted map left are still those that were written.

CRC-32 of each window as it was written, and of the bytes of the file before its first pixel: it
finds what disks and copies do to files, at the speed of reading.
"""

import os
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import rasterio
from numpy.typing import NDArray
from rasterio.windows import Window as FileWindow

from tilenet.files.opened import GDAL_ERRORS
from tilenet.files.plain_file import refuse_special

__all__ = ["Part", "frame_of", "part_of", "why_not_kept", "wrong_pixels"]

# Row, column, height and width of a window of the file, and CRC-32 of its pixels.
Part = tuple[int, int, int, int, int]

BAND_BYTES = 64 << 20  # of a window that are read at once


def part_of(window: FileWindow, values: NDArray[Any]) -> Part:
    """What is kept of pixels (bands, H, W) that are written to a window."""
    found = 0
    for band in values:
        found = zlib.crc32(np.ascontiguousarray(band).data, found)
    return window.row_off, window.col_off, window.height, window.width, found


def frame_of(path: str, block_bytes: int) -> tuple[int, int]:
    """Bytes of a file before its blocks, and their CRC-32.

    Args:
        block_bytes: Of all blocks, which stand at its end.

    Raises:
        OSError: It cannot be read.
    """
    refuse_special(path)
    num_bytes = max(0, os.path.getsize(path) - block_bytes)
    with open(path, "rb") as file:
        return num_bytes, zlib.crc32(file.read(num_bytes))


def why_not_kept(path: str, block_bytes: int, frame: tuple[int, int], parts: Iterable[Part]) -> str:
    """Why a file's pixels are not those that were written; "": they are."""
    try:
        if frame_of(path, block_bytes) != frame:
            return "damaged: its header is not what was written"
        wrong = wrong_pixels(path, parts)
        if wrong:
            return f"damaged: {wrong}"
    except FileNotFoundError:
        return "gone"
    except GDAL_ERRORS as error:
        reason = " ".join(str(error.__cause__ or error).split())
        return f"damaged: it cannot be read ({reason})"
    return ""


def wrong_pixels(path: str, parts: Iterable[Part]) -> str:
    """Which of a file's pixels are not those that were written; "": they all are.

    Raises:
        OSError, rasterio.errors.RasterioError: It cannot be read.
    """
    with rasterio.open(path) as file:
        for row, col, height, width, crc in parts:
            found = 0
            for band in file.indexes:
                found = _crc_of(file, band, (row, col, height, width), found)
            if found != crc:
                return (
                    f"its pixels are not what was written (rows {row} to {row + height - 1}, "
                    f"columns {col} to {col + width - 1})"
                )
    return ""


def _crc_of(file: Any, band: int, place: tuple[int, int, int, int], crc: int) -> int:
    """Of a band's pixels, after others; a window as wide as an image is read in strips."""
    row, col, height, width = place
    if min(row, col, height - 1, width - 1) < 0:
        return -1
    if row + height > file.height or col + width > file.width:
        return -1
    rows = max(1, BAND_BYTES // (width * np.dtype(file.dtypes[0]).itemsize))
    for top in range(row, row + height, rows):
        window = FileWindow(col, top, width, min(rows, row + height - top))
        crc = zlib.crc32(file.read(band, window=window), crc)
    return crc
