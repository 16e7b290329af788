"""Read windows of label rasters that lie on the image's pixel grid."""

from itertools import product
from types import TracebackType

import numpy as np
from affine import Affine
from numpy.typing import NDArray

from tilenet.errors import TilenetError
from tilenet.files.coarsen import block_mode
from tilenet.files.raster import Raster
from tilenet.geometry.tiles import Window

__all__ = ["Labels"]


class Labels:
    """An open label raster; a context manager.

    Args:
        path: A raster of one band of whole numbers.
        image: The image whose grid it must share; None: any.
        ignore_index: Label of pixels that do not count; nodata becomes it.

    Raises:
        TilenetError: The raster has several bands or real numbers, or another size, CRS or
            transform than the image.
    """

    def __init__(self, path: str, image: Raster | None, ignore_index: int) -> None:
        self.path = path
        self.ignore_index = ignore_index
        self._raster = Raster(path)
        try:
            self._check_pixels()
            self._factor = 1 if image is None else self._factor_to(image)
        except TilenetError:
            self._raster.close()
            raise
        self.height, self.width = self._raster.size if image is None else image.size

    def __enter__(self) -> "Labels":
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
        self._raster.close()

    def read(self, window: Window, region: Window | None = None) -> NDArray[np.int64]:
        """Labels of a window of a region, (H, W); `ignore_index` beyond the region and for nodata.

        Args:
            window: Relative to the region, in pixels of the image at the resolution it is read at.
            region: Pixels of the image that count as the image; None: all.

        Raises:
            TilenetError: The file cannot be read there.
        """
        region = region or Window(0, 0, self.height, self.width)
        labels = np.full((window.height, window.width), self.ignore_index, np.int64)
        top, left = max(0, -window.row), max(0, -window.col)
        height = min(window.height, region.height - window.row) - top
        width = min(window.width, region.width - window.col) - left
        if height > 0 and width > 0:
            row, col = region.row + window.row + top, region.col + window.col + left
            inside = self._read_inside(Window(row, col, height, width))
            labels[top : top + height, left : left + width] = inside
        return labels

    def _read_inside(self, window: Window) -> NDArray[np.int64]:
        fine = self._raster.fine(window, self._factor)
        pixels = self._raster.read(fine)
        labels = np.where(pixels.valid, pixels.values[0].astype(np.int64), self.ignore_index)
        if self._factor == 1:
            return labels
        return block_mode(labels, self._factor, self.ignore_index)

    def _check_pixels(self) -> None:
        labels = self._raster
        if labels.num_bands_in_file != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise TilenetError(
                f"labels must be one band of whole numbers ({self.path}: {labels.num_bands_in_file}"
                f" bands of {labels.dtype}); write the classes to such a file"
            )

    def _factor_to(self, image: Raster) -> int:
        """How many label pixels stand along a side of an image pixel.

        1, unless the image is read at a coarser resolution than its own, or is a map made so.
        """
        labels = self._raster
        ratio = round(_pixel(image.transform) / _pixel(labels.transform))
        fitting = [
            factor
            for factor in (1, image.factor, max(1, ratio))
            if tuple(-(-cells // factor) for cells in labels.size) == image.size
        ]
        if not fitting:
            raise TilenetError(
                f"labels must have the image's size ({self.path}: {_shape(labels.size)}, "
                f"{image.path}: {_shape(image.size_in_file)}, rows × columns); put them on the "
                "image's grid with gdalwarp -r near"
            )
        # A file without CRS (PNG, JPEG, plain TIFF) is taken to lie on the other's grid.
        if labels.crs is None or image.crs is None:
            return fitting[0]
        if labels.crs != image.crs:
            raise TilenetError(
                f"labels must have the image's CRS ({self.path}: {labels.crs.to_string()}, "
                f"{image.path}: {image.crs.to_string()}); reproject them with gdalwarp -r near"
            )
        coarse = labels.coarser(fitting[0])
        if not _same_grid(coarse, image.transform, *image.size):
            raise TilenetError(
                f"labels must lie on the image's pixel grid ({self.path}: {tuple(coarse)[:6]}, "
                f"{image.path}: {tuple(image.transform)[:6]}); put them on it with gdalwarp -r near"
            )
        return fitting[0]


def _same_grid(first: Affine, second: Affine, height: int, width: int) -> bool:
    """Whether all corners agree to a hundredth of a pixel: what rounding elsewhere leaves."""
    for row, col in product((0, height), (0, width)):
        x, y = (
            (a[0] - b[0]) * col + (a[1] - b[1]) * row + a[2] - b[2]
            for a, b in ((first[:3], second[:3]), (first[3:6], second[3:6]))
        )
        if np.hypot(x, y) > _pixel(second) / 100:
            return False
    return True


def _pixel(transform: Affine) -> float:
    """Side of a pixel in the raster's units."""
    return float(np.hypot(transform.a, transform.d))


def _shape(size: tuple[int, int]) -> str:
    return f"{size[0]} × {size[1]}"
