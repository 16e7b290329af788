"""Whether two rasters have the same pixel grid."""

from itertools import product

import numpy as np
from affine import Affine

__all__ = ["same_grid"]


def same_grid(first: Affine, second: Affine, height: int, width: int) -> bool:
    """Whether all corners agree to a hundredth of a pixel: what rounding elsewhere leaves."""
    for row, col in product((0, height), (0, width)):
        x, y = (
            (a[0] - b[0]) * col + (a[1] - b[1]) * row + a[2] - b[2]
            for a, b in ((first[:3], second[:3]), (first[3:6], second[3:6]))
        )
        if np.hypot(x, y) > np.hypot(second.a, second.d) / 100:
            return False
    return True
