"""Read windows of rasters: any dtype, with a mask, at the raster's own resolution or a coarser one.

The only module that opens images. A raster is opened after MPI is up and read by windows only; no
pixel outside of the asked window is kept.
"""

import os
import warnings
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import rasterio
from affine import Affine
from numpy.typing import NDArray
from rasterio._err import CPLE_BaseError
from rasterio.enums import ColorInterp
from rasterio.errors import NotGeoreferencedWarning, RasterioError
from rasterio.windows import Window as FileWindow

from tilenet.errors import TilenetError
from tilenet.files.coarsen import block_mean
from tilenet.geometry.tiles import Window, reflected

__all__ = ["GDAL_ERRORS", "Nodata", "Pixels", "Raster", "reason", "why_no_raster"]

# GDAL's default cache is 5 % of the node's memory *per process*; with 40 ranks on a node that is
# twice the memory. 64 MB hold the blocks that neighbouring tiles share; set GDAL_CACHEMAX higher
# for huge rasters in strips, of which every tile needs whole rows.
os.environ.setdefault("GDAL_CACHEMAX", "64")

# What rasterio raises for GDAL's errors; some reach the caller as the private kind.
GDAL_ERRORS = (RasterioError, OSError, CPLE_BaseError)

STRIP_BYTES = 64 << 20  # of the file's pixels that are averaged at once

# None: what the file says. "none": every pixel is valid. A number: that value is no data.
Nodata = float | str | None


@dataclass(frozen=True)
class Pixels:
    """A window of an image.

    Attributes:
        values: (C, H, W), in the raster's own dtype.
        valid: (H, W); False where there is no data, or a value that is not finite.
    """

    values: NDArray[Any]
    valid: NDArray[np.bool_]


class Raster:
    """An open raster; a context manager.

    Args:
        path: Any file that GDAL reads; GeoTIFF, PNG, JPEG, VRT …
        bands: Bands to read, counted from 1; None: all but alpha.
        resolution: Pixel size to read at, in the raster's units, a whole multiple of its own
            (within 5 %: 0.3 reads 0.0746 m pixels four by four); None: its own.
        nodata: See `Nodata`.

    Raises:
        TilenetError: The file is missing or broken, a band does not exist, the dtype is complex, or
            the resolution is no whole multiple of the raster's own.
    """

    def __init__(
        self,
        path: str,
        bands: tuple[int, ...] | None = None,
        resolution: float | None = None,
        nodata: Nodata = None,
    ) -> None:
        self.path = path
        self._dataset = _open(path)
        self.nodata = nodata
        try:
            self.bands = self._checked_bands(bands)
            self.factor = self._factor(resolution)
            self._check_nodata()
        except TilenetError:
            self._dataset.close()
            raise
        self.height = -(-self._dataset.height // self.factor)
        self.width = -(-self._dataset.width // self.factor)
        self.crs = self._dataset.crs
        # Scaled, never rebuilt from bounds, so that a rotated grid stays rotated.
        self.transform = self.coarser(self.factor)
        dtype = np.result_type(*(self._dataset.dtypes[band - 1] for band in self.bands))
        coarse = np.dtype(np.float64 if dtype == np.float64 else np.float32)
        self.dtype = dtype if self.factor == 1 else coarse

    def __enter__(self) -> "Raster":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._dataset.close()

    @property
    def dataset(self) -> Any:
        """rasterio's open file."""
        return self._dataset

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels at the resolution that is read."""
        return self.height, self.width

    @property
    def num_bands_in_file(self) -> int:
        """Bands of the file, alpha included."""
        return int(self._dataset.count)

    @property
    def size_in_file(self) -> tuple[int, int]:
        """Height and width of the file's own pixels."""
        return int(self._dataset.height), int(self._dataset.width)

    def coarser(self, factor: int) -> Affine:
        """From columns and rows of pixels `factor` times coarser than the file's to coordinates."""
        t = self._dataset.transform
        return Affine(t.a * factor, t.b * factor, t.c, t.d * factor, t.e * factor, t.f)

    @property
    def whole(self) -> Window:
        """The window of all pixels."""
        return Window(0, 0, self.height, self.width)

    def read(self, window: Window, region: Window | None = None) -> Pixels:
        """Read a window of a region of the raster.

        Args:
            window: Relative to the region; where it reaches over the region's edge, the region is
                seen reflected, again and again.
            region: Pixels of the raster that count as the image; None: all.

        Raises:
            TilenetError: The file cannot be read there.
        """
        region = region or self.whole
        rows = _places(window.row, window.height, region.height)
        cols = _places(window.col, window.width, region.width)
        top, left = min(rows), min(cols)
        inside = Window(
            region.row + top, region.col + left, max(rows) - top + 1, max(cols) - left + 1
        )
        values, valid = self._read_inside(inside)
        if len(rows) != inside.height or rows[0] != top:
            places = [row - top for row in rows]
            values, valid = values[:, places], valid[places]
        if len(cols) != inside.width or cols[0] != left:
            places = [col - left for col in cols]
            values, valid = values[:, :, places], valid[:, places]
        return Pixels(values, valid)

    def _read_inside(self, window: Window) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        if self.factor == 1:
            return self._read_file(window)
        values = np.empty((len(self.bands), window.height, window.width), self.dtype)
        valid = np.empty((window.height, window.width), np.bool_)
        row_bytes = window.width * self.factor**2 * len(self.bands) * self.dtype.itemsize
        rows = max(1, STRIP_BYTES // row_bytes)
        for row in range(0, window.height, rows):
            strip = slice(row, min(row + rows, window.height))
            coarse = Window(window.row + row, window.col, strip.stop - row, window.width)
            fine = self.fine(coarse, self.factor)
            values[:, strip], valid[strip] = block_mean(*self._read_file(fine), self.factor)
        return values, valid

    def fine(self, window: Window, factor: int) -> Window:
        """The file's pixels under a window of pixels that are `factor` times coarser."""
        row, col = window.row * factor, window.col * factor
        height = min(window.height * factor, self._dataset.height - row)
        return Window(row, col, height, min(window.width * factor, self._dataset.width - col))

    def _read_file(self, window: Window) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        place = FileWindow(window.col, window.row, window.width, window.height)
        try:
            # Band by band where their dtypes differ: rasterio reads several only of one dtype.
            if len({self._dataset.dtypes[band - 1] for band in self.bands}) > 1:
                parts = [self._dataset.read(band, window=place) for band in self.bands]
                values = np.stack(parts).astype(np.result_type(*parts))
            else:
                values = self._dataset.read(list(self.bands), window=place)
            mask = self._dataset.dataset_mask(window=place) if self.nodata is None else None
        except GDAL_ERRORS as error:
            raise TilenetError(
                f"a raster must be readable everywhere ({self.path}: rows {window.row} to "
                f"{window.row + window.height - 1}, columns {window.col} to "
                f"{window.col + window.width - 1} cannot be read: {reason(error)}); copy the "
                "file again or check it with gdalinfo -checksum"
            ) from error
        if mask is not None:
            valid = mask != 0
        elif isinstance(self.nodata, str):
            valid = np.ones(values.shape[1:], np.bool_)
        else:
            valid = (values != self.nodata).any(axis=0)
        if np.issubdtype(values.dtype, np.floating):
            valid &= np.isfinite(values).all(axis=0)
        return values, valid

    def _checked_bands(self, bands: tuple[int, ...] | None) -> tuple[int, ...]:
        count = self._dataset.count
        if bands is None:
            alpha = ColorInterp.alpha
            colours = self._dataset.colorinterp
            bands = tuple(b for b in range(1, count + 1) if colours[b - 1] != alpha)
        if not bands:
            raise TilenetError(f"at least one band must be read ({self.path} has {count})")
        wrong = [band for band in bands if not 1 <= band <= count]
        if wrong:
            raise TilenetError(
                f"bands are counted from 1 to the file's number of bands (bands: {list(bands)}, "
                f"{self.path} has {count}); leave out {wrong}"
            )
        complex_bands = [b for b in bands if "complex" in self._dataset.dtypes[b - 1]]
        if complex_bands:
            raise TilenetError(
                f"pixels must be real numbers (band {complex_bands[0]} of {self.path} is "
                f"{self._dataset.dtypes[complex_bands[0] - 1]}); write its amplitude to a new file"
            )
        return tuple(bands)

    def _factor(self, resolution: float | None) -> int:
        if resolution is None:
            return 1
        transform = self._dataset.transform
        own = float(np.hypot(transform.a, transform.d))
        usable = resolution > 0 and np.isfinite(resolution)
        factor = max(1, round(resolution / own)) if usable else 0
        if not factor or abs(factor * own / resolution - 1) > 0.05:
            below = int(resolution / own) if usable else 0
            factors = sorted({max(1, below), max(1, below + 1)})
            legal = " or ".join(f"{f * own:.6g}" for f in factors)
            raise TilenetError(
                f"resolution must be a whole multiple of the raster's own, within 5 % (resolution: "
                f"{resolution:g}, {self.path}: {own:.6g}); nearest: {legal}"
            )
        return factor

    def _check_nodata(self) -> None:
        if isinstance(self.nodata, str) and self.nodata != "none":
            raise TilenetError(f"nodata is a number, or none (nodata: {self.nodata})")


def _open(path: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotGeoreferencedWarning)
            return rasterio.open(path)
    except GDAL_ERRORS as error:
        raise TilenetError(
            f"a raster must be a file that GDAL can open ({path}: {reason(error)}); check the path"
        ) from error


def why_no_raster(path: str) -> str | None:
    """GDAL's reason why it cannot open a raster; None: it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotGeoreferencedWarning)
            rasterio.open(path).close()
    except GDAL_ERRORS as error:
        return reason(error)
    return None


def reason(error: Exception) -> str:
    """GDAL's own words: rasterio keeps them in the cause."""
    return " ".join(str(error.__cause__ or error).split())


def _places(first: int, count: int, pixels: int) -> list[int] | range:
    if first >= 0 and first + count <= pixels:
        return range(first, first + count)
    return reflected(first, count, pixels)
