"""Pieces of a map: a folder of files that all ranks write, so that a stopped map can be resumed.

A piece gets its name once it is on disk, so that a file of the right size is whole. A map is
resumed only if none of its inputs has changed: `made_of.json` lists them. So are the tiles that are
compressed from its pieces: `compressed.json` says how many of them are whole.
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

from tilenet.geometry.tiles import Tile, owned
from tilenet.geometry.windows import Window, overlap
from tilenet.storage.atomic import put

MADE_OF = "made_of.json"
NAME = re.compile(r"(\d+)_(\d+)_(\d+)_(\d+)\.raw")


def begin_pieces(folder: Path, made_of: dict[str, Any] | None) -> str:
    """Prepare a folder for the pieces of this map: remove those of another one.

    Args:
        made_of: Inputs of the map, as plain values; None: its pieces do not outlive this job.

    Returns:
        Why pieces in the folder cannot be used; "": they can, or there were none.

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
            # Compared as they come back from a file (lists for tuples), and as text (NaN ≠ NaN).
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
    """Write a file under another name, then rename it.

    Args:
        lasting: Whether the file is synced to the disk before it is renamed.

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
        folder: Folder of the pieces.
        count: Number of the map's bands.
        height, width: Size of the map in pixels.
        dtype: Name of the dtype of its pixels.
        nodata: Value of pixels without data, and of pixels that are in no piece.
        windows: Row, column, height and width of each piece in the map, (pieces, 4).
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
        """Dtype of pixels in files: little-endian, so that any machine reads them."""
        dtype: np.dtype[Any] = np.dtype(self.dtype).newbyteorder("<")
        return dtype

    def path(self, window: Iterable[int]) -> Path:
        """Path of the piece of a window."""
        return self.folder / f"{'_'.join(map(str, window))}.raw"

    def list_whole(self) -> list[Window]:
        """Windows of the pieces in the folder that are whole.

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
        # Band by band: a block of an overview is computed from sixteen times as many pixels.
        for band in range(self.count):
            pixels = self._read_band(band, Window(top, left, height, width))
            if pixels.shape == out_shape[1:]:
                values[band] = pixels
                continue
            with rasterio.open(
                "piece",
                "w+",
                driver="MEM",
                height=height,
                width=width,
                count=1,
                dtype=self.dtype,
                nodata=self.nodata,
            ) as memory:
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
            place = Window(row, col, height, width)
            shape = self.count, height, width
            piece = np.memmap(self.path(astuple(place)), self.file_dtype, "r", shape=shape)
            part = overlap(place, window)
            assert part is not None, "it touches the window"
            owned(values, Tile(window, part))[:] = owned(piece[band], Tile(place, part))
        return values
