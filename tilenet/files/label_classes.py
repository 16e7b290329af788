"""Check that labels are classes, wherever they are read before training or scored."""

import numpy as np
from numpy.typing import NDArray

from tilenet.errors import TilenetError
from tilenet.files.label_source import LabelSource
from tilenet.geometry.tiles import Window

__all__ = ["check_classes"]


def check_classes(
    labels: LabelSource, classes: NDArray[np.int64], window: Window, num_classes: int
) -> None:
    """Refuse labels that are neither a class nor `ignore_index`.

    Args:
        labels: That were read.
        classes: What was read there, (H, W).
        window: Where, in pixels of the image.
        num_classes: They are 0 to this − 1.

    Raises:
        TilenetError: With the first of them and its place.
    """
    wrong = (classes != labels.ignore_index) & ((classes < 0) | (classes >= num_classes))
    if wrong.any():
        row, col = np.argwhere(wrong)[0]
        raise TilenetError(
            f"labels must be 0 to classes − 1, or ignore_index ({labels.path}: "
            f"{classes[row, col]} at row {window.row + row}, column {window.col + col}; classes: "
            f"{num_classes}, ignore_index: {labels.ignore_index}); raise classes or relabel"
        )
