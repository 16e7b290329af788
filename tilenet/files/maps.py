"""Write maps by windows: one writer, a file aside, then a cloud-optimised GeoTIFF in its place."""

import contextlib
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import rasterio
import rasterio.shutil
from numpy.typing import NDArray
from rasterio.windows import Window as FileWindow

from tilenet.errors import TilenetError
from tilenet.files.raster import GDAL_ERRORS, Raster
from tilenet.files.stack import stacked_paths
from tilenet.geometry.tiles import Window

__all__ = ["MapKind", "MapWriter", "check_target", "class_colours"]

BLOCK_PX = 512


@dataclass(frozen=True)
class MapKind:
    """What a map holds.

    Attributes:
        bands: Number of bands.
        dtype: Of the pixels.
        nodata: Value of pixels without data.
        classes: Names of the classes: the bands' names, or the meanings of the values of a class
            map of one band, which then has a colour table.
    """

    bands: int
    dtype: str
    nodata: float
    classes: tuple[str, ...]


def check_target(path: str, *, overwrite: bool, image: str | None = None) -> None:
    """Refuse a map that exists, or a directory that cannot be written, before any work is done.

    Raises:
        TilenetError: With the remedy.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if (
        image is not None
        and os.path.exists(path)
        and os.path.realpath(path) in map(os.path.realpath, (image, *stacked_paths(image)))
    ):
        raise TilenetError(f"a map may not replace its image ({path}); give it another name")
    if os.path.isdir(path):
        raise TilenetError(
            f"a map is a file ({path} is a directory); give it a name ending in .tif"
        )
    if os.path.exists(path) and not overwrite:
        raise TilenetError(
            f"a map is not overwritten unasked ({path} exists); add --overwrite or another name"
        )
    if not os.path.isdir(folder):
        raise TilenetError(f"a map needs an existing directory ({folder} is none); make it first")
    probe = os.path.join(folder, f".{os.path.basename(path)}.probe.part")
    try:
        with open(probe, "wb"):
            pass
        os.remove(probe)
    except OSError as error:
        raise TilenetError(
            f"a map needs a directory that can be written ({folder}: {error.strerror}); choose "
            "another one"
        ) from error


class MapWriter:
    """A map being written; a context manager that leaves either the whole map or nothing.

    Args:
        path: Of the finished map.
        like: Gives size, transform and CRS; copied, so that rotated grids survive.
        kind: What the map holds.
    """

    def __init__(self, path: str, like: Raster, kind: MapKind) -> None:
        self.path = path
        self.kind = kind
        self._size = like.size
        folder, name = os.path.split(os.path.abspath(path))
        # One name per map: what a killed run leaves, the next one overwrites.
        self._raw = os.path.join(folder, f".{name}.raw.part")
        self._cog = os.path.join(folder, f".{name}.cog.part")
        profile = {
            "driver": "GTiff",
            "height": like.height,
            "width": like.width,
            "count": kind.bands,
            "dtype": kind.dtype,
            "nodata": kind.nodata,
            "crs": like.crs,
            "transform": like.transform,
            "tiled": True,
            "blockxsize": BLOCK_PX,
            "blockysize": BLOCK_PX,
            # Uncompressed: own windows do not fall on blocks, and a compressed block that is
            # written twice leaves its first copy in the file. The finished map is compressed.
            "BIGTIFF": "IF_SAFER",
            "interleave": "band",
        }
        self._dataset = self._guarded(lambda: rasterio.open(self._raw, "w", **profile))
        self._guarded(self._describe)

    def _describe(self) -> None:
        dataset, kind = self._dataset, self.kind
        if kind.bands > 1:
            for band, name in enumerate(kind.classes, start=1):
                dataset.set_band_description(band, name)
            return
        dataset.update_tags(1, **{f"class_{i}": name for i, name in enumerate(kind.classes)})
        if kind.dtype == "uint8":
            colours = dict(enumerate(class_colours(len(kind.classes))))
            dataset.write_colormap(1, {**colours, int(kind.nodata): (0, 0, 0, 0)})

    def write(self, window: Window, values: NDArray[Any]) -> None:
        """Write `values` (bands, H, W) to a window; what lies beyond the raster is cut off."""
        height = min(window.height, self._size[0] - window.row)
        width = min(window.width, self._size[1] - window.col)
        if height <= 0 or width <= 0:
            return
        place = FileWindow(window.col, window.row, width, height)
        inside = np.ascontiguousarray(values[:, :height, :width])
        self._guarded(lambda: self._dataset.write(inside, window=place))

    def finish(self) -> None:
        """Close the file, make it cloud-optimised, and put it in its place."""
        self._guarded(self._dataset.close)
        self._guarded(self._check_raw)
        classes = self.kind.bands == 1
        options = {
            "driver": "COG",
            "compress": "DEFLATE",
            "predictor": "NO" if classes else "YES",
            "BIGTIFF": "IF_SAFER",
            "overview_resampling": "MODE" if classes else "AVERAGE",
            "blocksize": BLOCK_PX,
        }
        self._guarded(lambda: rasterio.shutil.copy(self._raw, self._cog, **options))
        self._guarded(self._check_cog)
        self._guarded(lambda: _put(self._cog, self.path))
        self._remove()

    def _check_raw(self) -> None:
        """Closing says nothing of blocks that no longer fitted on the disk."""
        pixels = self._size[0] * self._size[1] * self.kind.bands
        if os.path.getsize(self._raw) < pixels * np.dtype(self.kind.dtype).itemsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _check_cog(self) -> None:
        """Neither does copying: read every block back, of the overviews too, before it counts."""
        with rasterio.open(self._raw) as raw, rasterio.open(self._cog) as cog:
            for _, place in cog.block_windows(1):
                if raw.read(window=place).tobytes() != cog.read(window=place).tobytes():
                    raise OSError(errno.EIO, "what was written is not what is read back")
            overviews = len(cog.overviews(1))
        for level in range(overviews):
            with rasterio.open(self._cog, OVERVIEW_LEVEL=level) as cog:
                for _, place in cog.block_windows(1):
                    cog.read(window=place)

    def __enter__(self) -> "MapWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(*GDAL_ERRORS):
            self._dataset.close()
        self._remove()

    def _remove(self) -> None:
        for path in (self._raw, self._cog):
            with contextlib.suppress(OSError):
                os.remove(path)

    def _guarded(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except GDAL_ERRORS as error:
            self._remove()
            reason = " ".join(str(error.__cause__ or error).split())
            raise TilenetError(
                f"a map must be writable to its end ({self.path}: {reason}); make room there or "
                "choose another directory"
            ) from error


def _put(aside: str, path: str) -> None:
    with open(aside, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(aside, path)


def class_colours(classes: int) -> list[tuple[int, int, int, int]]:
    """Distinct colours for class maps, (red, green, blue, alpha), 0 to 255.

    Hues a golden section apart are spread evenly, however many there are.
    """
    colours = []
    for index in range(classes):
        hue = (index * 0.618034 + 0.13) % 1 * 6
        value = 0.9 if index % 2 == 0 else 0.65
        fraction = 1 - abs(hue % 2 - 1)
        red, green, blue = [
            (1, fraction, 0),
            (fraction, 1, 0),
            (0, 1, fraction),
            (0, fraction, 1),
            (fraction, 0, 1),
            (1, 0, fraction),
        ][int(hue)]
        light = [round(255 * value * (0.25 + 0.75 * part)) for part in (red, green, blue)]
        colours.append((light[0], light[1], light[2], 255))
    return colours
