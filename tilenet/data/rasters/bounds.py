"""Bounds of a window of pixels, in a raster's CRS or in another one."""

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rasterio.errors import CRSError
from rasterio.warp import transform_bounds

from tilenet.data.rasters.opening import GDAL_ERRORS
from tilenet.geometry.windows import Window

if TYPE_CHECKING:
    from affine import Affine
    from rasterio.crs import CRS

# Points of an edge that are transformed: between two of them an edge bends by about a hundredth of
# what it bends as a whole, and `bounds_in` adds a hundredth to all sides.
EDGE_POINTS = 21


class Bounds(NamedTuple):
    """Sides of an upright rectangle in the units of a CRS; x to the right, y upwards."""

    left: float
    bottom: float
    right: float
    top: float

    @property
    def finite(self) -> bool:
        """Whether all sides are numbers, neither infinite nor NaN."""
        return bool(np.isfinite(self).all())

    def wider(self, share: float) -> "Bounds":
        """These bounds with `share` of their width and height added on each side."""
        x, y = (self.right - self.left) * share, (self.top - self.bottom) * share
        return Bounds(self.left - x, self.bottom - y, self.right + x, self.top + y)

    def meets(self, other: "Bounds") -> bool:
        """Whether two rectangles have more than an edge in common."""
        across = self.left < other.right and other.left < self.right
        return across and self.bottom < other.top and other.bottom < self.top

    def __str__(self) -> str:
        return f"x {self.left:.9g} to {self.right:.9g}, y {self.bottom:.9g} to {self.top:.9g}"


def bounds_of(transform: "Affine", window: Window) -> Bounds:
    """Bounds of a window of pixels, however the grid is rotated."""
    rows = window.row, window.row + window.height
    cols = window.col, window.col + window.width
    t = transform
    x = [t.a * col + t.b * row + t.c for row, col in product(rows, cols)]
    y = [t.d * col + t.e * row + t.f for row, col in product(rows, cols)]
    return Bounds(min(x), min(y), max(x), max(y))


def bounds_in(bounds: Bounds, source: "CRS | None", target: "CRS | None") -> Bounds | None:
    """Bounds in another CRS that hold all of the rectangle; None: they cannot be transformed.

    Where they cross the 180th meridian, they reach all around the Earth.
    """
    if source == target:
        return bounds
    try:
        moved = Bounds(*transform_bounds(source, target, *bounds, densify_pts=EDGE_POINTS))
    except (*GDAL_ERRORS, CRSError, ValueError):
        return None
    if not moved.finite:
        return None
    if moved.left > moved.right:
        moved = moved._replace(left=-180.0, right=180.0)
    return moved.wider(0.01)


def crs_name(crs: "CRS | None") -> str:
    """The CRS's code, `EPSG:…`, or the name in its definition where it has none."""
    if crs is None:
        return "none"
    text = str(crs.to_string())
    return text if "[" not in text else f"{text.split(chr(34))[1]} (a CRS without code)"


def unit_name(crs: "CRS | None") -> str | None:
    """The CRS's name of its unit; None: it does not say."""
    try:
        return str(crs.units_factor[0]) if crs else None
    except (*GDAL_ERRORS, CRSError):
        return None
