"""Labels of a part of an image only: the rest does not count."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tilenet.files.label_source import LabelSource
from tilenet.geometry.tiles import Window

__all__ = ["HeldOutLabels"]


class HeldOutLabels(LabelSource):
    """Labels of which some are hidden, window by window.

    Training sees those away from held-out blocks, validation those inside: two views of one file.

    Args:
        labels: Open; they stay whoever's opened them until this is closed.
        hidden: Where pixels of a window of the image do not count, (H, W).
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

    @property
    def identity(self) -> tuple[object, ...]:
        """This object alone knows what it hides, so nobody else's labels are the same."""
        return "held out", self._labels.identity, id(self)

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
