"""The labels of an image, whether its file holds pixels or polygons.

Labels are classes, which is checked wherever they are read. Those of a part of an image leave the
rest out; a validation image is one to score a network on while it trains. Labels of a
regression are numbers too: as classes they are 0 wherever there is a number.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tilenet.data.rasters.fingerprint import files_beside
from tilenet.data.rasters.handles import READING
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window

Source = TypeVar("Source", bound="LabelSource")


class LabelSource(ABC):
    """Labels on an image's pixel grid; a context manager.

    Attributes:
        path: File of the labels.
        ignore_index: Label of pixels that do not count.
        height: Height of the image, in pixels at the resolution it is read at.
        width: Width of the image, in the same pixels.
        facts: GDAL's facts about the file, where it is a raster.
        factor: Pixels of the file along a side of one that is read, where it is a raster.
    """

    path: str
    facts: str = ""
    factor: int = 1
    ignore_index: int
    height: int
    width: int

    def __enter__(self: Source) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def files(self) -> tuple[str, ...]:
        """All files that are read: the labels' own and those that belong to it."""
        return files_beside(self.path)

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def read(self, window: Window, region: Window | None = None) -> NDArray[np.int64]:
        """Labels of a window of a region, (H, W); `ignore_index` beyond the region and for nodata.

        Args:
            window: Window of the region, in pixels of the image at the resolution it is read at.
            region: Pixels of the image that count as the image; None: all.

        Raises:
            TilenetError: The file cannot be read there.
        """
        return self._placed(window, region, self.ignore_index, self._read_inside)

    @property
    def uncounted(self) -> float:
        """The target of pixels that do not count: `ignore_index`, or NaN."""
        return self.ignore_index

    def targets(self, window: Window, region: Window | None = None) -> NDArray[Any]:
        """Targets of a loss, (H, W): classes; in a regression float64.

        Arguments and errors as of `read`; `uncounted` where that has `ignore_index`.
        """
        return self._placed(window, region, self.uncounted, self._targets_inside)

    def counted(self, targets: NDArray[Any]) -> NDArray[np.bool_]:
        """Return a mask of the targets that count."""
        numbers = np.isnan(self.uncounted)
        mask: NDArray[np.bool_] = ~np.isnan(targets) if numbers else targets != self.uncounted
        return mask

    def _placed(
        self,
        window: Window,
        region: Window | None,
        fill: float,
        inside: Callable[[Window], NDArray[Any]],
    ) -> NDArray[Any]:
        """Labels that `inside` reads of a window of a region; `fill` beyond it."""
        region = region or Window(0, 0, self.height, self.width)
        labels = np.full((window.height, window.width), fill)  # int64, or float64
        top, left = max(0, -window.row), max(0, -window.col)
        height = min(window.height, region.height - window.row) - top
        width = min(window.width, region.width - window.col) - left
        if height > 0 and width > 0:
            row, col = region.row + window.row + top, region.col + window.col + left
            with READING:
                values = inside(Window(row, col, height, width))
            labels[top : top + height, left : left + width] = values
        return labels

    def sample(self, window: Window) -> NDArray[np.int64]:
        """One label for each pixel of a window within the image: for pictures, (H, W).

        For an image that is read at a coarse resolution no more is read or burned than that.

        Raises:
            TilenetError: The file cannot be read there.
        """
        return self._read_inside(window)

    @abstractmethod
    def _read_inside(self, window: Window) -> NDArray[np.int64]:
        """Labels of a window that lies within the image, (H, W)."""

    def _targets_inside(self, window: Window) -> NDArray[Any]:
        return self._read_inside(window)


def check_classes(
    labels: LabelSource, classes: NDArray[np.int64], window: Window, num_classes: int
) -> None:
    """Refuse labels that are neither a class nor `ignore_index`.

    Args:
        classes: Labels of the window, (H, W).

    Raises:
        TilenetError: Names the first of them and its place.
    """
    wrong = (classes != labels.ignore_index) & ((classes < 0) | (classes >= num_classes))
    if wrong.any():
        row, col = np.argwhere(wrong)[0]
        raise TilenetError(
            f"labels must be 0 to classes − 1, or ignore_index ({labels.path}: "
            f"{classes[row, col]} at row {window.row + row}, column {window.col + col}; classes: "
            f"{num_classes}, ignore_index: {labels.ignore_index}); raise classes or relabel"
        )


class HeldOutLabels(LabelSource):
    """Labels with a part hidden, window by window.

    Training sees labels away from held-out blocks, validation labels inside: two views of one file.

    Args:
        labels: Open labels, closed by their opener.
        hidden: Function that returns a mask of a window's pixels that do not count, (H, W).
    """

    def __init__(self, labels: LabelSource, hidden: Callable[[Window], NDArray[np.bool_]]) -> None:
        self._labels, self._hidden = labels, hidden
        self.path, self.ignore_index = labels.path, labels.ignore_index
        self.height, self.width = labels.height, labels.width
        self.factor = labels.factor

    @property
    def files(self) -> tuple[str, ...]:
        """All files that are read."""
        return self._labels.files

    def close(self) -> None:
        """Close the file."""
        self._labels.close()

    def _read_inside(self, window: Window) -> NDArray[np.int64]:
        hidden = self._hidden(window)
        if hidden.all():  # polygons need not be burned there, nor pixels read
            return np.full(hidden.shape, self.ignore_index, np.int64)
        labels = self._labels.read(window)
        labels[hidden] = self.ignore_index
        return labels

    @property
    def uncounted(self) -> float:
        """The target that does not count, the same as without hiding."""
        return self._labels.uncounted

    def _targets_inside(self, window: Window) -> NDArray[Any]:
        hidden = self._hidden(window)
        if hidden.all():
            return np.full(hidden.shape, self.uncounted)
        targets = self._labels.targets(window)
        targets[hidden] = self.uncounted
        return targets


@dataclass(frozen=True)
class ValidationImage:
    """An image, or the held-out parts of one; the files are closed by their opener.

    Attributes:
        labels: Open labels on the image's grid; `ignore_index` on pixels that do not count.
        windows: Windows of the image that hold all pixels that count; None: the whole image.
    """

    image: Raster
    labels: LabelSource
    windows: tuple[Window, ...] | None
