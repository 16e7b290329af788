"""What training asks of labels, whether they are pixels or polygons in their file."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tilenet.files.fingerprint import files_beside
from tilenet.files.raster import READING
from tilenet.files.staged import Kind, StagedBlocks
from tilenet.files.staging_folder import StagingFolder
from tilenet.geometry.tiles import Window

__all__ = ["LabelSource"]

Source = TypeVar("Source", bound="LabelSource")


class LabelSource(ABC):
    """Labels on an image's pixel grid; a context manager.

    Attributes:
        path: Their file.
        ignore_index: Label of pixels that do not count.
        height: Of the image, in pixels at the resolution it is read at.
        width: Likewise.
        facts: What GDAL says of the file, where it is a raster.
        factor: Pixels of the file along a side of one that is read, where it is a raster.
    """

    path: str
    facts: str = ""
    factor: int = 1
    ignore_index: int
    height: int
    width: int
    staged: StagedBlocks | None = None

    def __enter__(self: Source) -> Source:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
            with READING:
                inside = self._read_or_staged(Window(row, col, height, width))
            labels[top : top + height, left : left + width] = inside
        return labels

    def stage_in(self, folder: StagingFolder) -> None:
        """From now on read what a folder holds, and leave there what it does not."""
        # Class numbers are small; blocks that hold others are not staged.
        stored = np.result_type(np.int16, np.min_scalar_type(self.ignore_index))
        kinds = [Kind((), np.dtype(np.int64), stored)]
        self.staged = StagedBlocks(folder, self.identity, (self.height, self.width), kinds)

    def _read_or_staged(self, window: Window) -> NDArray[np.int64]:
        if self.staged is None:
            return self._read_inside(window)
        (labels,) = self.staged.read(window, lambda part: (self._read_inside(part),))
        return labels

    @property
    @abstractmethod
    def identity(self) -> tuple[object, ...]:
        """Whatever labels depend on."""

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
