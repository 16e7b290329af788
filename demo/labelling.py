"""Training labels as people draw them: borders a little off, some objects wrong, some blots."""

import numpy as np
from land import BUILDING, CLASSES, FIELD, FOREST, Land
from noise import byte, hashed, smooth_noise
from numpy.typing import NDArray

from tilenet.geometry.windows import Window

__all__ = ["drawn_labels"]

SHIFT_PX = 2  # borders are drawn at most this far off
BLOT_PX = 9


def drawn_labels(seed: int, window: Window, land: Land, margin_px: int) -> NDArray[np.uint8]:
    """Labels of a window with the mistakes of those who drew them.

    Args:
        land: Of the window with `margin_px` on all sides, at least `SHIFT_PX`.
    """
    rows, cols = np.ogrid[: window.height, : window.width]
    down = (smooth_noise(seed, window, 18) - 0.5) * 2 * SHIFT_PX
    right = (smooth_noise(seed + 1, window, 18) - 0.5) * 2 * SHIFT_PX
    place = (
        rows + margin_px + np.rint(down).astype(np.intp),
        cols + margin_px + np.rint(right).astype(np.intp),
    )
    kind, bits = land.classes[place], hashed(seed + 2, land.bits[place])
    labels: NDArray[np.uint8] = kind.copy()
    labels[(kind == FIELD) & (byte(bits, 0) < 0.03)] = FOREST  # what grew there once
    labels[(kind == BUILDING) & (byte(bits, 0) < 0.08)] = FIELD  # overlooked, or built since
    blot = hashed(
        seed + 3,
        np.arange(window.row, window.row + window.height)[:, None] // BLOT_PX,
        np.arange(window.col, window.col + window.width)[None, :] // BLOT_PX,
    )
    wrong = byte(blot, 0) < 0.015
    labels[wrong] = (byte(blot, 1) * np.float32(len(CLASSES) - 0.01)).astype(np.uint8)[wrong]
    return labels
