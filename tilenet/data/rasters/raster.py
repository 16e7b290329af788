"""Read windows of rasters: any dtype, with a mask, at the raster's own resolution or a coarser one.

The only module that opens images. A raster is opened after MPI is up and read by windows only; no
pixel outside of the window is kept.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from affine import Affine
from numpy.typing import NDArray

from tilenet.data.rasters.bands import BandNames, band_numbers
from tilenet.data.rasters.block_memory import keep_rows
from tilenet.data.rasters.collar import Collar, Runs, collar_strips, strip_runs
from tilenet.data.rasters.georeferencing import Georeferencing
from tilenet.data.rasters.handles import READING
from tilenet.data.rasters.resample import block_mean, dtype_of_means, factor_of
from tilenet.data.rasters.stack import FileStack
from tilenet.errors import TilenetError
from tilenet.geometry.pieces import strips_of, within
from tilenet.geometry.windows import Part, Window, reflected

# GDAL's remarks on files would stand on the terminal as they are; what matters comes as an error.
os.environ.setdefault("CPL_LOG", os.devnull)

STRIP_BYTES = 64 << 20  # of the file's pixels that are averaged, or looked at, at once
LEAST_ROWS = 64  # that are looked at at once for a collar, in files whose blocks have fewer

# None: what the file says. "none": every pixel is valid. A number: that value is no data. "collar":
# black pixels that reach the image's edge are no data.
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
        path: Any file that GDAL reads; GeoTIFF, PNG, JPEG, VRT …; several are joined by plus signs.
        bands: Bands to read, counted from 1, or by name; None: all but alpha.
        resolution: Pixel size to read at, in the raster's units, a whole multiple of its own
            (within 5 %: 0.3 reads 0.0746 m pixels four by four); None: its own.
        nodata: See `Nodata`.
        part: Part of it to show, as if the file held nothing else; None: all.

    Attributes:
        stack: The open file, or the files on the grid of the first.
        file_size: Height and width of all of the file's own pixels.
        cut_from: Size and transform of all of it, at that pixel size.
        part: The pixels of it that are seen; None: all.

    Raises:
        TilenetError: A file is missing or broken, stacked files cannot be put on one grid, a band
            does not exist, the dtype is complex, or the resolution is no whole multiple of the
            raster's own.
    """

    def __init__(
        self,
        path: str,
        bands: BandNames | None = None,
        resolution: float | None = None,
        nodata: Nodata = None,
        part: Part | None = None,
    ) -> None:
        self.path = path
        self.stack = FileStack(path, None if isinstance(nodata, str) else nodata)
        self.nodata = nodata
        self._collar: Collar | None = None
        try:
            self.bands = self._checked_bands(bands)
            self.factor = factor_of(resolution, self.stack.transform, path)
            self._check_nodata()
            self.file_size = self.size_in_file
            self.part: Window | None = None
            self._see()
            self.cut_from = self.size, self.transform
            if part is not None:
                self.cut(self.window_of(part))
        except TilenetError:
            self.stack.close()
            raise
        self.crs = self.stack.crs
        dtype = np.result_type(*(self.stack.dtypes[band - 1] for band in self.bands))
        self.dtype = dtype if self.factor == 1 else dtype_of_means(dtype)

    def _see(self) -> None:
        self.height = -(-self.stack.height // self.factor)
        self.width = -(-self.stack.width // self.factor)
        # Scaled, never rebuilt from bounds, so that a rotated grid stays rotated.
        self.transform = self.coarser(self.factor)

    def window_of(self, part: Part) -> Window:
        """The pixels of a part; all where it names nothing.

        Raises:
            TilenetError: The part has no pixels, or coordinates, which the image lacks.
        """
        if part.bbox is not None and self.georeferencing.missing:
            raise TilenetError(
                f"a bbox is in the coordinates of an image that has a place ({self.path}: "
                f"{self.georeferencing.missing}); name the part by its pixels (window), or "
                f"{self.georeferencing.remedy}"
            )
        return part.of(tuple(self.transform), self.size, self.path)

    def cut(self, window: Window) -> None:
        """From now on be as a file would be that holds a window of this one, and nothing else."""
        self.stack.cut(self.fine(window, self.factor))
        self._see()
        self.part = window

    def __enter__(self) -> "Raster":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self.stack.close()

    @property
    def dataset(self) -> Any:
        """rasterio's open file; of a stack the first."""
        return self.stack.dataset

    @property
    def georeferencing(self) -> Georeferencing:
        """Georeferencing of the file, whether or not pixels are placed by it."""
        return self.stack.georeferencing

    @property
    def files(self) -> tuple[str, ...]:
        """All files that are read, with masks and others that lie next to them."""
        return self.stack.files

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels at the resolution that is read."""
        return self.height, self.width

    @property
    def grid(self) -> tuple[object, ...]:
        """Where its pixels lie, at the resolution that is read."""
        crs = self.crs.to_wkt() if self.crs else None
        return crs, tuple(self.transform)[:6], self.size

    @property
    def band_names(self) -> list[str]:
        """The name to show of each band that is read; empty: the file gives it none."""
        return [self.stack.bands[band - 1].name for band in self.bands]

    @property
    def descriptions(self) -> tuple[str, ...]:
        """The description of each band that is read; empty: the file gives it none."""
        return tuple(self.stack.bands[band - 1].description for band in self.bands)

    @property
    def band_colours(self) -> dict[str, int]:
        """Bands that are read, by the colour that the file says they have; the first of each."""
        pairs = [(self.stack.bands[band - 1].colour, band) for band in reversed(self.bands)]
        return {colour: band for colour, band in pairs if colour}

    @property
    def scaling(self) -> tuple[tuple[float, float], ...]:
        """Scale and offset of each band that is read, as the file says; values are not scaled."""
        return tuple(self.stack.scaling[band - 1] for band in self.bands)

    @property
    def nodata_values(self) -> tuple[float | None, ...]:
        """The value without data of each band that is read, in the run file or its tag."""
        if self.nodata is None:
            return tuple(self.stack.nodata_tags[band - 1] for band in self.bands)
        return (None if isinstance(self.nodata, str) else self.nodata,) * len(self.bands)

    @property
    def size_in_file(self) -> tuple[int, int]:
        """Height and width of the file's own pixels."""
        return int(self.stack.height), int(self.stack.width)

    def keep_block_rows(self, rows: int, ranks_of_node: int) -> None:
        """Have GDAL keep the blocks that a strip of so many rows lies in: the next reads some."""
        block_rows = self.stack.block_rows
        keep_rows((rows * self.factor + 2 * block_rows) * self.stack.row_bytes, ranks_of_node)

    @property
    def facts(self) -> str:
        """GDAL's facts about the file: size, bands, dtype, scales, files on other grids."""
        height, width = self.file_size
        dtypes = "/".join(dict.fromkeys(self.stack.dtypes))
        notes = [f"; {os.path.basename(view.path)} {view.facts}" for view in self.stack.resampled]
        scaling = dict.fromkeys(self.stack.scaling)
        if set(scaling) != {(1.0, 0.0)}:
            notes.append("; " + "/".join(f"× {scale!r} {offset:+}" for scale, offset in scaling))
        return f"{height} × {width} px, {self.stack.count} × {dtypes}" + "".join(notes)

    def coarser(self, factor: int) -> Affine:
        """From columns and rows of pixels `factor` times coarser than the file's to coordinates."""
        return self.stack.transform @ Affine.scale(factor)

    @property
    def whole(self) -> Window:
        """The window of all pixels."""
        return Window(0, 0, self.height, self.width)

    def read(self, window: Window, region: Window | None = None) -> Pixels:
        """Read a window of a region of the raster.

        Args:
            window: Window of the region; beyond the region's edges the region is reflected, again
                and again.
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
        with READING:
            values, valid = self._read_inside(inside)
        if len(rows) != inside.height or rows[0] != top:
            values, valid = _spread(values, rows, top, 1), _spread(valid, rows, top, 0)
        if len(cols) != inside.width or cols[0] != left:
            values, valid = _spread(values, cols, left, 2), _spread(valid, cols, left, 1)
        return Pixels(values, valid)

    def _read_inside(self, window: Window) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        if self.factor == 1:
            return self._read_file(window)
        values = np.empty((len(self.bands), window.height, window.width), self.dtype)
        valid = np.empty((window.height, window.width), np.bool_)
        pixel_bytes = self.factor**2 * len(self.bands) * self.dtype.itemsize
        for part in strips_of(window, STRIP_BYTES // pixel_bytes):
            place = within(part, window)
            fine = self._read_file(self.fine(part, self.factor))
            values[:, place[0], place[1]], valid[place] = block_mean(*fine, self.factor)
        return values, valid

    def sample(self, window: Window, size: tuple[int, int] | None = None) -> Pixels:
        """One of the file's pixels for each pixel of a window within the raster: for pictures.

        As fast as the file's overviews allow, and never more memory than the picture takes: nothing
        is averaged. A collar is not looked for: pixels that are 0 in all bands are taken for it.

        Args:
            window: Window within the raster.
            size: Rows and columns to take, evenly spread; None: those of the window.

        Raises:
            TilenetError: The file cannot be read there.
        """
        fine, size = self.fine(window, self.factor), size or (window.height, window.width)
        values = self.stack.read(self.bands, fine, size)
        return Pixels(values, self._valid(values, fine, size))

    def fine(self, window: Window, factor: int) -> Window:
        """The file's pixels under a window of pixels that are `factor` times coarser."""
        row, col = window.row * factor, window.col * factor
        height = min(window.height * factor, self.stack.height - row)
        return Window(row, col, height, min(window.width * factor, self.stack.width - col))

    def _read_file(self, window: Window) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        values = self.stack.read(self.bands, window)
        return values, self._valid(values, window)

    def _valid(
        self, values: NDArray[Any], window: Window, size: tuple[int, int] | None = None
    ) -> NDArray[np.bool_]:
        """Where values (C, H, W) of the file's window, or samples of it, are data, (H, W)."""
        valid: NDArray[np.bool_]
        if self.nodata is None:
            valid = self.stack.mask(self.bands, values, window, size)
        elif self.nodata == "none":
            valid = np.ones(values.shape[1:], np.bool_)
        elif self.nodata == "collar":
            valid = ~self.collar.inside(window) if size is None else (values != 0).any(axis=0)
        else:
            assert not isinstance(self.nodata, str)
            valid = self.stack.differs(self.bands, values, self.nodata)
        if np.issubdtype(values.dtype, np.floating):
            valid &= np.isfinite(values).all(axis=0)
        covered = self.stack.covered(window, size)
        return valid if covered is None else valid & covered

    @property
    def collar(self) -> Collar:
        """The black collar, in the file's own pixels; found now unless it was handed in before."""
        if self._collar is None:
            self.collar = Collar(
                [self.collar_runs(s) for s in self.collar_strips], self.size_in_file
            )
        assert self._collar is not None
        return self._collar

    @collar.setter
    def collar(self, collar: Collar) -> None:
        self._collar = collar

    @property
    def collar_strips(self) -> list[Window]:
        """Windows of the file's own pixels that are looked at to find the collar."""
        return collar_strips(self.size_in_file, self.stack.block_rows)

    def collar_runs(self, strip: Window, part_done: Callable[[], None] = lambda: None) -> Runs:
        """Look at one strip.

        Args:
            part_done: Is called after each part of it, and may end the work.

        Raises:
            TilenetError: The file cannot be read there.
        """
        black = np.empty((strip.height, strip.width), np.bool_)
        # Whole blocks of a file in tiles as of one in rows; its pixels have 8 bytes at most.
        rows = -(-LEAST_ROWS // self.stack.block_rows) * self.stack.block_rows
        cols = max(1, STRIP_BYTES // (rows * len(self.bands) * 8))
        for row in range(0, strip.height, rows):
            for col in range(0, strip.width, cols):
                height, width = min(rows, strip.height - row), min(cols, strip.width - col)
                part = Window(strip.row + row, col, height, width)
                values = self.stack.read(self.bands, part)
                black[row : row + height, col : col + width] = ~values.any(axis=0)
                part_done()
        return strip_runs(black, strip.row)

    def _checked_bands(self, names: BandNames | None) -> tuple[int, ...]:
        files = self.stack
        if names is None:
            names = [band for band in range(1, files.count + 1) if band not in files.alpha]
        bands = band_numbers(names, files.bands, self.path)
        if not bands:
            raise TilenetError(f"at least one band must be read ({self.path} has {files.count})")
        wrong = [band for band in bands if not 1 <= band <= files.count]
        if wrong:
            raise TilenetError(
                f"bands are counted from 1 to the file's number of bands (bands: {list(bands)}, "
                f"{self.path} has {files.count}); leave out {wrong}"
            )
        complex_bands = [b for b in bands if "complex" in files.dtypes[b - 1]]
        if complex_bands:
            raise TilenetError(
                f"pixels must be real numbers (band {complex_bands[0]} of {self.path} is "
                f"{files.dtypes[complex_bands[0] - 1]}); name its amplitude, "
                f"DERIVED_SUBDATASET:AMPLITUDE:{self.path}, or write it to a new file"
            )
        return bands

    def _check_nodata(self) -> None:
        if isinstance(self.nodata, str) and self.nodata not in ("none", "collar"):
            raise TilenetError(f"nodata is a number, none, or collar (nodata: {self.nodata})")


def _places(first: int, count: int, pixels: int) -> list[int] | range:
    if first >= 0 and first + count <= pixels:
        return range(first, first + count)
    return reflected(first, count, pixels)


def _spread(values: NDArray[Any], places: Sequence[int], first: int, axis: int) -> NDArray[Any]:
    """The values at some places along an axis, counted from the first; whole runs of them at once.

    Between two edges reflected places go up or down by one.
    """
    parts, start = [], 0
    for stop in range(1, len(places) + 1):
        step = places[start + 1] - places[start] if start + 1 < len(places) else 1
        if stop < len(places) and step and places[stop] - places[stop - 1] == step:
            continue
        low, high = sorted((places[start] - first, places[stop - 1] - first))
        run = values[(slice(None),) * axis + (slice(low, high + 1),)]
        parts.append(run if step > 0 or stop - start == 1 else np.flip(run, axis))
        start = stop
    return np.concatenate(parts, axis)
