"""Pieces of a map: a folder of files that all ranks write; what is there is done.

A piece has its name once the disk holds it, so that a file of the right size is whole. A map goes
on only where nothing that it is made of has changed: `made_of.json` says what that is. So do tiles
compressed of its pieces, of which `compressed.json` says how many are whole.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from numpy.typing import NDArray
from rasterio.enums import Resampling
from rasterio.windows import Window as FileWindow

from tilenet.geometry.windows import Window
from tilenet.storage.atomic import put

__all__ = ["Pieces", "begin_pieces", "put_file"]

MADE_OF = "made_of.json"
NAME = re.compile(r"(\d+)_(\d+)_(\d+)_(\d+)\.raw")


def begin_pieces(folder: Path, made_of: dict[str, Any] | None) -> str:
    """Have a folder hold pieces of this map alone.

    Args:
        made_of: What it is made of, plain values; None: nothing of it outlives this job.

    Returns:
        Why what was done cannot be used; "": it can, or there was nothing.

    Raises:
        OSError: The folder cannot be read or written.
    """
    why, text = "", json.dumps(made_of)
    if made_of is not None:
        try:
            before = dict(json.loads((folder / MADE_OF).read_bytes()))
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, RecursionError):
            why = f"not said any more: its {MADE_OF} cannot be read"
        else:
            # As they come back from the file, lists for tuples; as text: NaN equals nothing.
            made_of = json.loads(text)
            changed = [
                name
                for name in {**made_of, **before}
                if json.dumps(made_of.get(name)) != json.dumps(before.get(name))
            ]
            if not changed:
                return ""
            why = f"of something else: {', '.join(changed)}"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    if made_of is not None:
        put_file(folder / MADE_OF, text.encode())
    return why


def put_file(path: Path, data: bytes | memoryview, *, lasting: bool = True) -> None:
    """Write a file aside, and give it its name.

    Args:
        lasting: Whether the disk has to hold it before.

    Raises:
        OSError: The disk does not take it.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(data)
        if lasting:
            put(part, path)
        else:
            part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Pieces:
    """The pieces of a map, read as rasterio reads a file.

    Attributes:
        count: Bands.
        dtype: Of the map's pixels.
        nodata: Value of pixels without data, and of those that are in no piece.
        windows: (pieces, 4): row, column, height and width of each, in the map.
    """

    folder: Path
    count: int
    height: int
    width: int
    dtype: str
    nodata: float
    windows: NDArray[np.int64]

    @property
    def file_dtype(self) -> np.dtype[Any]:
        """Dtype of pixels in files: the same bytes on any machine."""
        little: np.dtype[Any] = np.dtype(self.dtype).newbyteorder("<")
        return little

    def path(self, window: Iterable[int]) -> Path:
        """Path of the piece of a window."""
        return self.folder / f"{'_'.join(map(str, window))}.raw"

    def list_whole(self) -> list[Window]:
        """The windows of all pieces that are whole.

        Raises:
            OSError: The folder cannot be read.
        """
        windows, pixel_bytes = [], self.count * self.file_dtype.itemsize
        for entry in os.scandir(self.folder):
            if (match := NAME.fullmatch(entry.name)) is not None:
                window = Window(*map(int, match.groups()))
                if entry.stat().st_size == window.height * window.width * pixel_bytes:
                    windows.append(window)
        return windows

    def put(self, window: Window, values: NDArray[Any], *, lasting: bool) -> None:
        """Write a piece (bands, H, W).

        Raises:
            OSError: The disk does not take it.
        """
        data = np.ascontiguousarray(values, self.file_dtype)
        put_file(self.path(astuple(window)), data.data, lasting=lasting)

    def read(
        self, window: FileWindow, out_shape: tuple[int, int, int], resampling: Resampling
    ) -> NDArray[Any]:
        """The pixels of a window of the map, resampled to `out_shape`.

        Raises:
            OSError, rasterio.errors.RasterioError: They cannot be read.
        """
        top, left = floor(window.row_off), floor(window.col_off)
        height = min(self.height, ceil(window.row_off + window.height)) - top
        width = min(self.width, ceil(window.col_off + window.width)) - left
        values = np.empty(out_shape, self.dtype)
        inside = FileWindow(window.col_off - left, window.row_off - top, *window.flatten()[2:])
        # Band by band: of an overview's block there are sixteen times as many pixels.
        for band in range(self.count):
            pixels = self._read_band(band, Window(top, left, height, width))
            if pixels.shape == out_shape[1:]:
                values[band] = pixels
                continue
            size = {"height": height, "width": width, "count": 1}
            kind = {"driver": "MEM", "dtype": self.dtype, "nodata": self.nodata}
            with rasterio.open("piece", "w+", **size, **kind) as memory:
                memory.write(pixels, 1)
                memory.read(1, values[band], window=inside, resampling=resampling)
        return values

    def _read_band(self, band: int, window: Window) -> NDArray[Any]:
        """Pixels of a band in a window of the map; nodata where no piece is."""
        values = np.full((window.height, window.width), self.nodata, self.dtype)
        begin = np.array([window.row, window.col])
        end = begin + values.shape
        touch = (self.windows[:, :2] < end) & (self.windows[:, :2] + self.windows[:, 2:] > begin)
        for row, col, height, width in self.windows[touch.all(axis=1)].tolist():
            shape = self.count, height, width
            piece = np.memmap(
                self.path((row, col, height, width)), self.file_dtype, "r", shape=shape
            )
            top, left = max(row, window.row), max(col, window.col)
            part = piece[band, top - row : end[0] - row, left - col : end[1] - col]
            to = top - window.row, left - window.col
            values[to[0] : to[0] + part.shape[0], to[1] : to[1] + part.shape[1]] = part
        return values
