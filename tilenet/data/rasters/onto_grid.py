"""A file on another grid or in another CRS, seen on an image's grid: interpolated, or nearest.

What GDAL's warper gives for a pixel may depend on the window that it is asked for. Of 25 random
windows of a file in the next UTM zone, read without an alpha band, 25 differed from the whole
image, by up to 69 of 255: bilinear takes a kernel as wide as a window's pixels are to the file's,
and GDAL moves few pixels of a row and draws lines between them. With the kernel held, and lines as
good as exact, last digits still differed. So it is only asked for whole blocks of the image's grid:
in any window a pixel comes from its block.

A pixel is valid where the file's pixel below its middle is: of the four that are interpolated,
those without data do not count.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from affine import Affine
from numpy.typing import NDArray
from rasterio.enums import ColorInterp, Resampling
from rasterio.errors import CRSError
from rasterio.vrt import WarpedVRT
from rasterio.warp import transform

from tilenet.data.rasters.block_cache import BLOCKS, OWNERS
from tilenet.data.rasters.bounds import Bounds, bounds_in, bounds_of, crs_name
from tilenet.data.rasters.opening import GDAL_ERRORS, dtypes_of, reason
from tilenet.data.rasters.remedies import AVERAGE, LIKE, SET_CRS
from tilenet.data.rasters.rereading import read_window
from tilenet.errors import TilenetError, and_more
from tilenet.geometry.pieces import pieces_of, within
from tilenet.geometry.windows import Window

BLOCK_PX = 256
# GDAL moves a few pixels of a row and draws lines between them, as far as this many pixels are
# right. Its default, an eighth, takes the neighbour for one label in 500, and which depends on
# where the row begins; rasterio takes no 0.
TOLERANCE_PX = 1e-9
# Four pixels are interpolated, however wide GDAL finds them in a block, and all are read.
KERNEL = {"XSCALE": 1, "YSCALE": 1, "SOURCE_EXTRA": 16, "SAMPLE_GRID": True}
# Pixels of the file along one of the grid: of more, four would leave some out.
MOST_FINER = 2.05
POINTS = 5  # along a side, of what both cover, at which sizes of pixels are compared


class OntoGrid:
    """A file that is read on the grid of another one.

    Args:
        file: rasterio's open file; stays open.
        first: rasterio's open file that gives the grid.
        nodata: The value without data; None: what the file says.

    Attributes:
        method: `bilinear`, or `nearest` where numbers stand for colours or classes.

    Raises:
        TilenetError: One of them has no place, they lie apart, one cannot be moved to the other's
            CRS, the file's pixels are too fine, or its bands have several nodata tags.
    """

    def __init__(self, file: Any, first: Any, nodata: float | None) -> None:
        self.path = str(file.name)
        self._file, self._first = file, first
        _check_places(file, first)
        _check_overlap(file, first)
        _check_sizes(file, first)
        _check_tags(file)
        has_palette = ColorInterp.palette in file.colorinterp
        self.method = "nearest" if has_palette else "bilinear"
        self._alpha = ColorInterp.alpha in file.colorinterp
        self._source: dict[str, Any] = {"add_alpha": not self._alpha, "tolerance": TOLERANCE_PX}
        real = all(np.dtype(name).kind == "f" for name in dtypes_of(file) if "complex" not in name)
        if nodata is not None:
            self._source["src_nodata"] = nodata
        elif file.nodata is None and real and not self._alpha:
            self._source["src_nodata"] = np.nan  # or else it would make its neighbours NaN
        self._number = next(OWNERS)
        self._view = self._opened(first.transform, first.shape, Resampling[self.method])

    def _opened(self, grid: Affine, size: tuple[int, int], resampling: Resampling) -> Any:
        place = {"crs": self._first.crs, "transform": grid, "height": size[0], "width": size[1]}
        options = {"resampling": resampling, "UNIFIED_SRC_NODATA": "YES"} | KERNEL
        try:
            return WarpedVRT(self._file, **place, **options, **self._source)
        except (*GDAL_ERRORS, CRSError) as error:
            raise _immovable(self._file, self._first, reason(error)) from error

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the file."""
        return int(self._file.height), int(self._file.width)

    @property
    def crs(self) -> str:
        """Name of the file's CRS."""
        return crs_name(self._file.crs)

    def close(self) -> None:
        """Close the view, and forget what was read."""
        BLOCKS.drop(self._number)
        self._view.close()

    @property
    def facts(self) -> str:
        """The resampling method and the place of the file, to the thousandth of a pixel.

        Installations move coordinates differently: with grids of corrections, or without them.
        """
        height, width = self._first.shape
        corners = np.array([(0, 0), (width, 0), (0, height), (width, height)], float)
        x, y = self._first.transform @ tuple(corners.T)
        cells = ~self._file.transform @ _moved(x, y, self._first.crs, self._file.crs)
        places = ", ".join(f"{col:.3f} {row:.3f}" for col, row in zip(*cells, strict=True))
        return f"{self.method}, corners at {places} px"

    def read(
        self, window: Window, size: tuple[int, int] | None = None
    ) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Values (C, h, w) of all bands, and where there is data, (h, w).

        Args:
            window: Window within the grid.
            size: Rows and columns that are taken of it, evenly, the nearest pixels; None: all.

        Raises:
            TilenetError: The file cannot be read there.
        """
        if size is not None and size != (window.height, window.width):
            planes = self._sampled(window, size)
        else:
            planes = self._joined(window)
        alpha = self._file.colorinterp.index(ColorInterp.alpha) if self._alpha else -1
        return planes[: self._file.count], np.asarray(planes[alpha] != 0)

    def _joined(self, window: Window) -> NDArray[Any]:
        planes = np.empty((self._view.count, window.height, window.width), self._dtype)
        for piece in pieces_of(window, BLOCK_PX):
            block = _block_around(piece, self._first.shape)
            in_block, in_window = within(piece, block), within(piece, window)
            planes[:, in_window[0], in_window[1]] = self._block(block)[:, in_block[0], in_block[1]]
        return planes

    def _block(self, block: Window) -> NDArray[Any]:
        """Planes (C, h, w) of a block's values, then of where they are valid."""
        place = self._number, block.row, block.col
        planes = BLOCKS.get(*place)
        if planes is None:
            planes = self._planes(block, lambda place: self._view.read(window=place))
            BLOCKS.put(*place, planes)
        return planes

    def _sampled(self, window: Window, size: tuple[int, int]) -> NDArray[Any]:
        scale = Affine.scale(window.width / size[1], window.height / size[0])
        grid = self._first.transform @ Affine.translation(window.col, window.row) @ scale
        # Not read as other sizes are: GDAL would make all pixels of the grid first.
        with self._opened(grid, size, Resampling.nearest) as view:
            return self._planes(window, lambda _: view.read())

    def _planes(self, window: Window, read: Callable[[Any], Any]) -> NDArray[Any]:
        return np.asarray(read_window(self.path, window, read, self._first.name))

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.result_type(*self._view.dtypes)


def resampling_notes(files: Sequence[OntoGrid]) -> list[str]:
    """A sentence on the files of each resampling method."""
    notes = []
    for method in dict.fromkeys(file.method for file in files):
        paths = list(dict.fromkeys(file.path for file in files if file.method == method))
        notes.append(
            f"bands of {and_more(paths)} lie on another grid than the image and are resampled to "
            f"it ({method}); where they do not reach, pixels do not count"
        )
    return notes


def _block_around(piece: Window, size: tuple[int, int]) -> Window:
    """The block of a grid that a piece lies in."""
    row, col = piece.row - piece.row % BLOCK_PX, piece.col - piece.col % BLOCK_PX
    return Window(row, col, min(BLOCK_PX, size[0] - row), min(BLOCK_PX, size[1] - col))


def _moved(x: Any, y: Any, source: Any, target: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    if source != target:
        x, y = transform(source, target, x, y)
    return np.asarray(x), np.asarray(y)


def _bounds(file: Any) -> Bounds:
    return bounds_of(file.transform, Window(0, 0, *file.shape))


def _check_places(file: Any, first: Any) -> None:
    for dataset in (first, file):
        lacks = "no CRS" if not dataset.crs else "no transform"
        if dataset.crs and dataset.transform != Affine.identity():
            continue
        both = first, file
        if file.shape != first.shape:
            what, (expected, actual) = "size", (f"{f.height} × {f.width}" for f in both)
        elif file.crs != first.crs:
            what, (expected, actual) = "CRS", (crs_name(f.crs or None) for f in both)
        elif file.transform != first.transform:
            what, (expected, actual) = "transform", (str(tuple(f.transform)[:6]) for f in both)
        else:
            what, expected, actual = "ground control points", "its own", "others"
        raise TilenetError(
            f"stacked files must have the same {what}, unless each has a CRS and a transform to be "
            f"resampled by ({first.name}: {expected}, {file.name}: {actual}; {dataset.name} has "
            f"{lacks}); put them on one grid with {LIKE}, or name what is missing with {SET_CRS}"
        )


def _check_overlap(file: Any, first: Any) -> None:
    moved = bounds_in(_bounds(first), first.crs, file.crs)
    if moved is None:
        raise _immovable(file, first, "GDAL finds no way")
    if not moved.meets(_bounds(file)):
        bounds = bounds_in(_bounds(file), file.crs, first.crs)
        raise TilenetError(
            f"stacked files must overlap ({first.name}: {_bounds(first)}, {file.name}: "
            f"{bounds or _bounds(file)}, in {crs_name(first.crs if bounds else file.crs)}); check "
            "that they show one place and that both name the right CRS"
        )


def _check_sizes(file: Any, first: Any) -> None:
    moved = bounds_in(_bounds(first), first.crs, file.crs)
    assert moved is not None
    lows = np.maximum(moved[:2], _bounds(file)[:2])
    highs = np.minimum(moved[2:], _bounds(file)[2:])
    x, y = (part.ravel() for part in np.meshgrid(*np.linspace(lows, highs, POINTS).T))
    t, cells = file.transform, []
    for right, up in ((0, 0), (t.a, t.d), (t.b, t.e)):
        moved_points = _moved(x + right, y + up, file.crs, first.crs)
        cells.append(np.stack(~first.transform @ moved_points))
    sides = np.hypot(*np.stack([cells[1] - cells[0], cells[2] - cells[0]], axis=1))
    sides = sides[np.isfinite(sides) & (sides > 0)]
    finer = 1 / sides.min() if sides.size else 1.0
    if finer > MOST_FINER:
        raise TilenetError(
            "a stacked file on another grid may be at most twice as fine as the first, or pixels "
            f"would be left out ({file.name}: {finer:.3g} of its pixels along one of "
            f"{first.name}); average it first with {AVERAGE}, or name the finest file first"
        )


def _check_tags(file: Any) -> None:
    tags = dict.fromkeys(map(str, file.nodatavals))
    if len(tags) > 1:
        raise TilenetError(
            "a stacked file on another grid may have one nodata tag for all its bands "
            f"({file.name}: {', '.join(tags)}); put it on the grid with {LIKE}"
        )


def _immovable(file: Any, first: Any, why: str) -> TilenetError:
    return TilenetError(
        f"a stacked file must be in a CRS that can be moved to the first one's ({file.name}: "
        f"{crs_name(file.crs)}, {first.name}: {crs_name(first.crs)}: {why}); put it on the grid "
        f"of the first with {LIKE}"
    )
