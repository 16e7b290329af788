"""Files seen as one file on the grid of the first: `R.tif+G.tif+B.tif`, `image.tif+heights.tif`.

The plus is what YAML and shells leave alone: `images: [a.tif, b.tif]` are two images,
`images: [a_R.tif+a_G.tif, b_R.tif+b_G.tif]` are two as well. A virtual raster of GDAL could hold
the bands, but its mask says that a pixel counts where *any* band has data; in a stack each file
has its own say.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from math import isfinite
from pathlib import PurePath
from typing import Any

import numpy as np
from affine import Affine
from numpy.typing import NDArray
from rasterio.enums import ColorInterp, MaskFlags

from tilenet.data.rasters.bands import Band
from tilenet.data.rasters.georeferencing import georeferencing_of
from tilenet.data.rasters.handles import Handles, Viewed
from tilenet.data.rasters.location import file_name
from tilenet.data.rasters.onto_grid import BLOCK_PX, OntoGrid
from tilenet.data.rasters.opening import (
    GDAL_ERRORS,
    cannot_open,
    check_header,
    dtypes_of,
    files_of,
    opened,
)
from tilenet.data.rasters.rereading import read_window
from tilenet.data.rasters.stacked_paths import stacked_paths
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window


def same_grid(first: Affine, second: Affine, height: int, width: int, px: float = 0.01) -> bool:
    """Whether all corners agree to a part of a pixel: a hundredth is what rounding leaves."""
    pixel = min(np.hypot(second.a, second.d), np.hypot(second.b, second.e))
    for row, col in product((0, height), (0, width)):
        x, y = (
            (a[0] - b[0]) * col + (a[1] - b[1]) * row + a[2] - b[2]
            for a, b in ((first[:3], second[:3]), (first[3:6], second[3:6]))
        )
        if np.hypot(x, y) > pixel * px:
            return False
    return True


class FileStack:
    """One file, or several, open as `Handles` has it; their bands are counted through from 1.

    Args:
        path: A file, or several joined by plus signs. A path with a plus sign that GDAL opens as
            it stands is one file.
        nodata: The value without data in files on another grid than the first; None: what they say.

    Attributes:
        height, width: Size in pixels of the files.
        crs, transform: Those of the first file; no CRS without a transform.
        dtypes: One per band.
        bands: Names of each band.
        scaling: Scale and offset tags of each band.
        nodata_tags: Nodata tag of each band; None: it has none.
        alpha: Numbers of the bands that are masks of other bands.
        files: All files that are read, with masks and others that lie next to them.

    Raises:
        TilenetError: A file is missing or broken, or cannot be resampled to the first one's grid.
    """

    def __init__(self, path: str, nodata: float | None = None) -> None:
        self.path = path
        self._handles, self._nodata = Handles(path, _open_all), nodata
        self._apart: tuple[int, ...] = ()  # numbers of the files that are resampled
        try:
            self._look()
            self._apart = tuple(self._off_grid())
            _ = self.resampled
        except (TilenetError, *GDAL_ERRORS) as error:
            self.close()
            if isinstance(error, TilenetError):
                raise
            raise cannot_open(path, error) from error

    def _look(self) -> None:
        """Note what the files say of themselves."""
        datasets = self._handles.files
        first = datasets[0]
        for dataset in datasets:
            check_header(dataset)
        self.height, self.width = int(first.height), int(first.width)
        self._first = 0, 0  # row and column in the files where what is seen of them begins
        self.georeferencing = georeferencing_of(first)
        self.crs: Any = self.georeferencing.crs if self.georeferencing.placed else None
        self.transform: Any = self.georeferencing.transform
        # The file's number, and the band's there, of each band.
        self._places = [(n, b) for n, d in enumerate(datasets) for b in range(1, d.count + 1)]
        self.files = tuple(files_of(datasets))
        self._handles.alone = len(self.files) == len(datasets)
        self._handles.placed = not self._handles.alone or [d.driver for d in datasets] != ["GTiff"]
        self._block_rows = tuple(int(d.block_shapes[0][0]) for d in datasets)
        # Of each file once: rasterio asks GDAL for all bands each time.
        self.dtypes = tuple(name for d in datasets for name in dtypes_of(d))
        colours = [colour for d in datasets for colour in d.colorinterp]
        texts = [text for d in datasets for text in d.descriptions]
        scales = [scale for d in datasets for scale in d.scales]
        offsets = [offset for d in datasets for offset in d.offsets]
        self.scaling = tuple(map(_tags, scales, offsets))
        self.nodata_tags = tuple(tag for d in datasets for tag in d.nodatavals)
        self.bands = tuple(
            _band(datasets[number], colour, text, len(datasets) > 1)
            for (number, _), colour, text in zip(self._places, colours, texts, strict=True)
        )
        self.alpha = tuple(n for n, c in enumerate(colours, start=1) if c == ColorInterp.alpha)
        self._tags = [_plain_tag(d) for d in datasets]
        # Alpha bands that GDAL does not take for masks, since they are neither uint8 nor uint16.
        self._wide_alpha = [wide_alpha(d) for d in datasets]
        self._whole = [d.mask_flag_enums[0] == [MaskFlags.all_valid] for d in datasets]
        self._counts = [d.count for d in datasets]

    def cut(self, window: Window) -> None:
        """From now on be as files would be that hold a window of these, and nothing else."""
        self.transform = self.transform @ Affine.translation(window.col, window.row)
        self._first = self._first[0] + window.row, self._first[1] + window.col
        self.height, self.width = window.height, window.width

    def _in_files(self, window: Window) -> Window:
        row, col = self._first
        return Window(window.row + row, window.col + col, window.height, window.width)

    def close(self) -> None:
        """Close the files."""
        self._handles.close()

    @property
    def count(self) -> int:
        """Bands of all files, alpha included."""
        return len(self._places)

    @property
    def resampled(self) -> tuple[OntoGrid, ...]:
        """The files that lie on another grid than the first."""
        return tuple(map(self._on_grid, self._apart))

    @property
    def on_grid(self) -> tuple[Any, ...]:
        """rasterio's open files that are read as they are."""
        return tuple(d for n, d in enumerate(self._handles.files) if n not in self._apart)

    @property
    def block_rows(self) -> int:
        """Rows of the highest blocks."""
        rows = max(rows for n, rows in enumerate(self._block_rows) if n not in self._apart)
        return max(rows, BLOCK_PX) if self._apart else rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of pixels of all bands."""
        return self.width * sum(np.dtype(name).itemsize for name in self.dtypes)

    @property
    def datasets(self) -> tuple[Any, ...]:
        """rasterio's open files; opened again they may be without CRS and transform."""
        return tuple(self._handles.files)

    @property
    def dataset(self) -> Any:
        """The first of `datasets`."""
        return self._handles.files[0]

    def view(self, key: object, make: Callable[[list[Any]], Viewed]) -> Viewed:
        """The result of `make` for the open files, kept by its key; closed before they are."""
        return self._handles.view(key, make)

    def read(
        self, bands: Sequence[int], window: Window, size: tuple[int, int] | None = None
    ) -> NDArray[Any]:
        """Values (C, H, W) of a window, in a dtype that holds those of all the bands.

        Args:
            size: Rows and columns that are taken of the window, evenly spread; None: all.

        Raises:
            TilenetError: A file cannot be read there.
        """
        window = self._in_files(window)
        if len(self._tags) == 1 and len({self.dtypes[number - 1] for number in bands}) == 1:
            dataset = self.dataset  # all at once: files often hold bands pixel by pixel
            shape = None if size is None else (len(bands), *size)
            values: NDArray[Any] = read_window(
                dataset.name,
                window,
                lambda place: dataset.read(list(bands), window=place, out_shape=shape),
            )
            return values
        parts = [self._read_band(number, window, size) for number in bands]
        return np.stack(parts).astype(np.result_type(*parts), copy=False)

    def _read_band(self, number: int, window: Window, size: tuple[int, int] | None) -> NDArray[Any]:
        file, band = self._places[number - 1]
        values: NDArray[Any]
        if file in self._apart:
            values = self._on_grid(file).read(window, size)[0][band - 1]
        else:
            values = _read_band(self._handles.files[file], band, window, size)
        return values

    def mask(
        self,
        bands: Sequence[int],
        values: NDArray[Any],
        window: Window,
        size: tuple[int, int] | None = None,
    ) -> NDArray[np.bool_]:
        """Where the files on the grid have data, by masks, alpha bands or nodata tags, (H, W).

        Args:
            bands: Numbers of the bands that `values` (C, H, W) are of.
            values: Values of the window. Where they tell, no mask is read: that would decode every
                block again that does not fit GDAL's cache, as with whole rows of a wide image.
            size: As in `read`.

        Raises:
            TilenetError: A file cannot be read there.
        """
        window = self._in_files(window)
        valid = np.ones(size or (window.height, window.width), np.bool_)
        places = [self._places[number - 1] for number in bands]
        for file, (tag, count) in enumerate(zip(self._tags, self._counts, strict=True)):
            if file in self._apart:
                continue
            if alpha := self._wide_alpha[file]:
                valid &= _read_band(self._handles.files[file], alpha, window, size) != 0
            if self._whole[file]:
                continue
            rows = {band: row for row, (owner, band) in enumerate(places) if owner == file}
            if tag is not None and len(rows) == count:
                valid &= _any_differs(values, list(rows.values()), tag)
            else:
                valid &= _read_mask(self._handles.files[file], window, size) != 0
        return valid

    def differs(
        self, bands: Sequence[int], values: NDArray[Any], nodata: float
    ) -> NDArray[np.bool_]:
        """Where in each file on the grid a band differs from `nodata`, (H, W).

        Args:
            bands: Numbers of the bands that `values` (C, H, W) are of.
        """
        valid = np.ones(values.shape[1:], np.bool_)
        owners = [self._places[number - 1][0] for number in bands]
        for file in set(owners) - set(self._apart):
            rows = [row for row, owner in enumerate(owners) if owner == file]
            if rows:
                valid &= (values[rows] != nodata).any(axis=0)
        return valid

    def covered(
        self, window: Window, size: tuple[int, int] | None = None
    ) -> NDArray[np.bool_] | None:
        """Where all files that are resampled have data, (H, W); None: no file is resampled.

        Args:
            size: As in `read`.

        Raises:
            TilenetError: A file cannot be read there.
        """
        window = self._in_files(window)
        masks = [view.read(window, size)[1] for view in self.resampled]
        return np.logical_and.reduce(masks) if masks else None

    def _off_grid(self) -> Iterator[int]:
        first, *rest = self._handles.files
        for number, other in enumerate(rest, start=1):
            if not (
                other.shape == first.shape
                and other.crs == first.crs
                and same_grid(first.transform, other.transform, *first.shape)
                and georeferencing_of(other).same_points(self.georeferencing)
            ):
                yield number

    def _on_grid(self, file: int) -> OntoGrid:
        """A file that is resampled."""
        return self.view(file, lambda files: OntoGrid(files[file], files[0], self._nodata))


def _open_all(path: str, alone: bool, placed: bool) -> list[Any]:
    try:
        return [opened(path, alone=alone, placed=placed)]
    except TilenetError:
        paths = stacked_paths(path)
        # A wrong name with a plus sign in it is one name, unless some of its parts are files, or
        # names such as /vsizip/… and NETCDF:….
        if len(paths) == 1 or not any(
            "/vsi" in part or ":" in part or os.path.exists(part) for part in paths
        ):
            raise
    with ExitStack() as stack:
        datasets = []
        for part in paths:  # not entered: only the same thread could then close it
            datasets.append(opened(part, alone=alone))
            stack.callback(datasets[-1].close)
        stack.pop_all()
    return datasets


def wide_alpha(dataset: Any) -> int:
    """Number of the alpha band of a file in which GDAL says that all pixels count; 0: none."""
    whole = dataset.mask_flag_enums[0] == [MaskFlags.all_valid]
    if not whole or ColorInterp.alpha not in dataset.colorinterp:
        return 0
    return int(dataset.colorinterp.index(ColorInterp.alpha)) + 1


def _read_band(dataset: Any, band: int, window: Window, size: tuple[int, int] | None) -> Any:
    return read_window(
        dataset.name, window, lambda place: dataset.read(band, window=place, out_shape=size)
    )


def _read_mask(dataset: Any, window: Window, size: tuple[int, int] | None) -> Any:
    return read_window(
        dataset.name, window, lambda place: dataset.dataset_mask(window=place, out_shape=size)
    )


def _band(dataset: Any, colour: Any, description: str | None, stacked: bool) -> Band:
    parts: tuple[str, ...] = ()
    if stacked and dataset.count == 1:
        stem = PurePath(file_name(dataset.name)).stem
        parts = tuple(dict.fromkeys((stem, *filter(None, re.split(r"[-_. ]+", stem)))))
    # Grey is what GDAL says of the first of bands of which it knows nothing.
    name = "" if colour in (ColorInterp.undefined, ColorInterp.gray) else str(colour.name)
    return Band((description or "").strip(), name, parts)


def _tags(scale: float, offset: float) -> tuple[float, float]:
    return (scale, offset) if isfinite(scale) and isfinite(offset) and scale else (1.0, 0.0)


def _any_differs(values: NDArray[Any], rows: Sequence[int], number: int) -> NDArray[np.bool_]:
    """Where one of some bands of (C, H, W) differs from a number; without copying them."""
    differs: NDArray[np.bool_] = values[rows[0]] != number
    for row in rows[1:]:
        differs |= values[row] != number
    return differs


def _plain_tag(dataset: Any) -> int | None:
    """The number that alone says where a file has no data: not where any band differs from it.

    None where something else says so, or where GDAL compares otherwise: real numbers nearly.
    """
    tag = dataset.nodata
    if tag is None or any(flags != [MaskFlags.nodata] for flags in dataset.mask_flag_enums):
        return None
    names = dtypes_of(dataset)
    if any("complex" in name for name in names):
        return None  # numpy has no name for complex numbers of 16 bits
    dtypes = [np.dtype(name) for name in names]
    if set(dataset.nodatavals) != {tag} or any(dtype.kind not in "iu" for dtype in dtypes):
        return None
    # Of 64 bits rasterio rounds the tag; what a dtype cannot hold is no data nowhere.
    exact = float(tag).is_integer() and all(dtype.itemsize <= 4 for dtype in dtypes)
    if not exact or any(not np.iinfo(d).min <= tag <= np.iinfo(d).max for d in dtypes):
        return None
    return int(tag)
