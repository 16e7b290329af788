"""Labels of a regression: a raster of numbers on the image's grid."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilenet.data.labels.raster import STRIP_PX, Labels
from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.resample import block_mean
from tilenet.errors import TilenetError
from tilenet.geometry.pieces import strips_of, within
from tilenet.geometry.windows import Window

NUMBER, NONE = 0, 255  # classes of pixels with a number, and without one


class Values(Labels):
    """An open raster of numbers; a context manager.

    Where the image is read at a coarser resolution, a pixel has the mean of its numbers, as the
    image's own pixels have.

    Args:
        path: A raster of one band; nodata, masked, NaN and infinite pixels hold no number. Scale
            and offset tags are applied: numbers have their unit.
        image: The image; numbers are read on its grid.

    Raises:
        TilenetError: The raster has several bands, or lies on another grid.
    """

    def __init__(self, path: str, image: Raster) -> None:
        super().__init__(path, image, NONE)
        if self.resampled:
            self.close()
            raise TilenetError(
                f"labels of a regression lie on the image's pixel grid ({path}: another than that "
                f"of {image.path}); put them on it with gdalwarp -r bilinear or -r average"
            )

    @property
    def uncounted(self) -> float:
        """NaN."""
        return float("nan")

    def sample(self, window: Window) -> NDArray[np.int64]:
        """Read values as `LabelSource.sample` does labels."""
        return self._read_inside(window)

    def _read_inside(self, window: Window) -> NDArray[np.int64]:
        return np.where(np.isnan(self._targets_inside(window)), NONE, NUMBER)

    def _targets_inside(self, window: Window) -> NDArray[Any]:
        numbers = np.empty((window.height, window.width), np.float64)
        ((scale, offset),) = self.raster.scaling
        for part in strips_of(window, STRIP_PX // self.factor**2):
            pixels = self.raster.read(self.raster.fine(part, self.factor))
            values, valid = block_mean(pixels.values.astype(np.float64), pixels.valid, self.factor)
            numbers[within(part, window)] = np.where(valid, values[0] * scale + offset, np.nan)
        return numbers

    def _check_pixels(self) -> None:
        if self.raster.stack.count != 1:
            raise TilenetError(
                f"labels of a regression are one band of numbers ({self.path}: "
                f"{self.raster.stack.count} bands); write the numbers to such a file"
            )
