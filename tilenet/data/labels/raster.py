"""Read windows of label rasters: as they are on the image's grid, and resampled from any other."""

import numpy as np
from affine import Affine
from numpy.typing import NDArray

from tilenet.data.labels.nearest import NearestPixels
from tilenet.data.labels.source import LabelSource
from tilenet.data.rasters.bounds import bounds_of, crs_name
from tilenet.data.rasters.raster import Pixels, Raster
from tilenet.data.rasters.remedies import SET_CRS, SET_TRANSFORM
from tilenet.data.rasters.resample import block_mode
from tilenet.data.rasters.stack import same_grid
from tilenet.errors import TilenetError
from tilenet.geometry.pieces import strips_of, within
from tilenet.geometry.windows import Window, overlap

FAR_PX = 1 << 31  # no raster has as many rows or columns
STRIP_PX = 1 << 22  # of the file that are joined to coarser ones at once


class Labels(LabelSource):
    """An open label raster; a context manager.

    Args:
        path: A raster of one band of whole numbers.
        image: The image; labels are read on its grid. None: on their own grid.
        ignore_index: Label of pixels that do not count; nodata becomes it, as do pixels beyond the
            edges of a raster on another grid.

    Attributes:
        raster: The open file, on its own grid.

    Raises:
        TilenetError: The raster has several bands or real numbers, lies elsewhere than the image,
            or has another size and no CRS.
    """

    def __init__(self, path: str, image: Raster | None, ignore_index: int) -> None:
        self.path = path
        self.ignore_index = ignore_index
        self.raster = Raster(path)
        self.facts = self.raster.facts
        self._nearest: NearestPixels | None = None
        try:
            self._check_pixels()
            place = (1, self.raster.whole) if image is None else self._place_of(image)
            if place is None and image is not None:
                self._nearest = NearestPixels(self.raster, image)
        except TilenetError:
            self.raster.close()
            raise
        self.factor = place[0] if place else 1  # the most frequent class of each block
        if place is not None and place[1] != self.raster.whole:
            self.raster.cut(place[1])
        self.height, self.width = self.raster.size if image is None else image.size

    @property
    def resampled(self) -> bool:
        """Whether they lie on another grid than the image."""
        return self._nearest is not None

    @property
    def files(self) -> tuple[str, ...]:
        """All files that are read, with masks and others that lie next to them."""
        return self.raster.files

    def close(self) -> None:
        """Close the file."""
        self.raster.close()

    def _read_inside(self, window: Window) -> NDArray[np.int64]:
        if self._nearest is not None:
            return self._classes(self._nearest.read(window))
        if self.factor == 1:
            return self._classes(self.raster.read(window))
        labels = np.empty((window.height, window.width), np.int64)
        for part in strips_of(window, STRIP_PX // self.factor**2):
            fine = self._classes(self.raster.read(self.raster.fine(part, self.factor)))
            labels[within(part, window)] = block_mode(fine, self.factor, self.ignore_index)
        return labels

    def _classes(self, pixels: Pixels) -> NDArray[np.int64]:
        return np.where(pixels.valid, pixels.values[0].astype(np.int64), self.ignore_index)

    def sample(self, window: Window) -> NDArray[np.int64]:
        """Read labels as `LabelSource.sample` does; blocks of finer labels are not counted."""
        if self._nearest is not None:
            return self._read_inside(window)
        place = self.raster.fine(window, self.factor)
        return self._classes(self.raster.sample(place, (window.height, window.width)))

    def _check_pixels(self) -> None:
        labels = self.raster
        if labels.stack.count != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise TilenetError(
                f"labels must be one band of whole numbers ({self.path}: {labels.stack.count}"
                f" bands of {labels.dtype}); write the classes to such a file, or train on "
                "numbers with task: regression"
            )

    def _place_of(self, image: Raster) -> tuple[int, Window] | None:
        """Number of label pixels along a side of an image pixel, and those under the image.

        1, unless the image is read at a coarser resolution than its own, or is a map made so. None:
        they lie on another grid, or not under all of the image.
        """
        labels = self.raster
        _check_ground(labels, image)
        ratio = round(_pixel(image.transform) / _pixel(labels.transform))
        # A file without CRS (PNG, JPEG, plain TIFF) is taken to lie on the other's grid.
        if labels.crs is None or image.crs is None:
            factor = _factor_by_size(labels, image, max(1, ratio))
            return factor, labels.fine(image.part or Window(0, 0, *image.cut_from[0]), factor)
        if labels.crs != image.crs:
            return None
        for factor in dict.fromkeys((1, image.factor, max(1, ratio))):
            grid = labels.coarser(factor)
            corner = ~grid @ (image.transform.c, image.transform.f)
            if not all(abs(place) < FAR_PX for place in corner):
                continue
            col, row = map(round, corner)
            window = Window(row, col, *image.size)
            if overlap(window, Window(0, 0, *(-(-n // factor) for n in labels.size))) == window:
                moved = grid @ Affine.translation(col, row)
                if same_grid(moved, image.transform, *image.size):
                    return factor, labels.fine(window, factor)
        return None


def _check_ground(labels: Raster, image: Raster) -> None:
    """Refuse labels on the ground for an image that is not there yet, and the other way around.

    Raises:
        TilenetError: One has GCPs or RPCs instead of a transform, and the other has a place, or
            GCPs of its own.
    """
    ratio = labels.file_size[1] / image.file_size[1]  # uncut, as points are
    scale = round(ratio) if ratio > 1 else 1 / round(1 / ratio)
    same = image.georeferencing.same_points(labels.georeferencing, scale)
    for raster, other in ((image, labels), (labels, image)):
        ours, theirs = raster.georeferencing, other.georeferencing
        apart = bool(ours.points and theirs.points) and not same
        if ours.missing and (apart or (theirs.placed and other.crs is not None)):
            raise TilenetError(
                "labels and image must lie on one pixel grid, or both on the ground ("
                f"{raster.path}: {ours.missing}, {other.path}: "
                f"{theirs.missing or crs_name(other.crs)}); {ours.remedy}"
            )


def _factor_by_size(labels: Raster, image: Raster, ratio: int) -> int:
    """Number of label pixels along a side of an image pixel, where one file has no CRS.

    Args:
        ratio: That number as far as both files' coordinates say it.

    Raises:
        TilenetError: Labels have another size than the image, and neither coordinates nor GCPs
            that say that they are finer ones of all of it: the image may be a map of a part.
    """
    size, grid = image.cut_from
    points = labels.georeferencing.points and image.georeferencing.points
    known = {size: 1, image.file_size: image.factor}.get(labels.size)
    factor = known or (max(1, round(labels.width / size[1])) if points else ratio)
    if known or tuple(-(-cells // factor) for cells in labels.size) == size:
        _check_coordinates(labels, image, factor)
        if known or points or same_grid(labels.coarser(factor), grid, *size, px=1):
            return factor
    crs = f"give both files their CRS with {SET_CRS}"
    raise TilenetError(
        "labels without a CRS, or of an image without, must have the image's size "
        f"({labels.path}: {_shape(labels.size)}, {image.path}: {_shape(image.file_size)}, "
        "rows × columns); put them on the image's grid, or "
        + (image.georeferencing.remedy if image.georeferencing.missing else crs)
    )


def _check_coordinates(labels: Raster, image: Raster, factor: int) -> None:
    """Refuse a file without CRS whose coordinates say that it lies elsewhere than the other.

    Less than a pixel is let pass: programs differ in whether coordinates are of a pixel's middle.

    Raises:
        TilenetError: The pixels of both have coordinates, and these differ.
    """
    if _counts_pixels(labels) or _counts_pixels(image):
        return
    size, grid = image.cut_from
    if not same_grid(labels.coarser(factor), grid, *size, px=1):
        place = bounds_of(grid, Window(0, 0, *size))
        raise TilenetError(
            "labels without a CRS, or of an image without, must have the image's coordinates, or "
            f"none ({labels.path}: {bounds_of(labels.transform, labels.whole)}; {image.path}: "
            f"{place}); give both files their CRS with {SET_CRS}, or the labels the image's "
            f"transform with {SET_TRANSFORM}"
        )


def _counts_pixels(raster: Raster) -> bool:
    """Whether its coordinates are columns and rows, from above or, as in some programs, below."""
    t = raster.georeferencing.transform
    return abs(t.a) == abs(t.e) == 1 and t.b == t.d == t.c == 0 and t.f in (0, raster.file_size[0])


def _pixel(transform: Affine) -> float:
    """Side of a pixel in the raster's units."""
    return float(np.hypot(transform.a, transform.d))


def _shape(size: tuple[int, int]) -> str:
    return f"{size[0]} × {size[1]}"
