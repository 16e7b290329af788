"""A map that stays in memory, on the rank that takes up its pieces."""

import numpy as np
from numpy.typing import NDArray

from tilenet.geometry.windows import Window, overlap
from tilenet.mapping.writer import MapKind

__all__ = ["MapInMemory"]


class MapInMemory:
    """Takes what `MapWriter` does, and writes no file.

    Args:
        kind: What it holds.
        window: Pixels of the image that it shows.

    Attributes:
        values: The map, (bands, H, W).
        why_anew: Why an interrupted map starts over: there is none.
    """

    why_anew = ""

    def __init__(self, kind: MapKind, window: Window) -> None:
        self.window = window
        self.values: NDArray[np.generic] = np.full(
            (kind.bands, window.height, window.width), kind.nodata, kind.dtype
        )

    def write(self, window: Window, values: NDArray[np.generic]) -> None:
        """Keep `values` (bands, H, W) of a window of the image; what the map lacks is cut off."""
        part = overlap(window, self.window)
        if part is None:
            return
        top, left = part.row - window.row, part.col - window.col
        row, col = part.row - self.window.row, part.col - self.window.col
        self.values[:, row : row + part.height, col : col + part.width] = values[
            :, top : top + part.height, left : left + part.width
        ]

    def __enter__(self) -> "MapInMemory":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is to be closed."""
