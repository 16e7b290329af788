"""Georeferencing of a raster: by a transform, by points, or by a camera's model.

Only a transform and a CRS make a map. Ground control points (GCPs) and rational polynomial
coefficients (RPCs) say how to make one; a CRS without a transform says nothing.
"""

from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import Any

from affine import Affine
from rasterio.control import GroundControlPoint
from rasterio.crs import CRS

from tilenet.data.rasters.remedies import ON_THE_GROUND, SET_TRANSFORM
from tilenet.geometry.windows import Window

SAME_PX = 0.01

Points = tuple[tuple[float, float, float, float, float | None], ...]


@dataclass(frozen=True)
class Georeferencing:
    """The georeferencing of a raster.

    Attributes:
        placed: Whether a transform says where its pixels lie.
        crs: CRS of the file, whether or not pixels are placed by it.
        transform: Transform of the file; the identity where it has none.
        points: Row, column, x, y and height of its GCPs.
        rpcs: rasterio's RPCs; None: the file has no RPCs.
    """

    placed: bool
    crs: Any
    transform: Affine
    points: Points
    points_crs: Any
    rpcs: Any

    @property
    def missing(self) -> str:
        """What it has in place of a transform, in words; "": it has one, or no georeferencing."""
        if self.placed:
            return ""
        parts = [f"{len(self.points)} ground control points"] * bool(self.points)
        parts += ["RPCs"] * (self.rpcs is not None)
        parts += ["a CRS"] * (bool(self.crs) and not parts)
        return f"{' and '.join(parts)}, but no transform" if parts else ""

    @property
    def remedy(self) -> str:
        """The command that gives it a transform, in words."""
        return (
            ON_THE_GROUND
            if self.points or self.rpcs is not None
            else f"give it its transform with {SET_TRANSFORM}"
        )

    def same_points(self, other: "Georeferencing", scale: float = 1.0) -> bool:
        """Whether two rasters have the same GCPs, to a hundredth of a pixel.

        Args:
            scale: Pixels of the other one along a pixel of this one.
        """
        if len(self.points) != len(other.points) or self.points_crs != other.points_crs:
            return False
        pairs = zip(self.points, other.points, strict=True)
        return all(
            abs(a[0] * scale - b[0]) < SAME_PX
            and abs(a[1] * scale - b[1]) < SAME_PX
            and a[2:] == b[2:]
            for a, b in pairs
        )

    def profile(self, transform: Affine) -> dict[str, Any]:
        """Options with which rasterio writes a part of the raster, besides what `copy_to` gives."""
        # A part's own transform, such as two pixels to the right, would pass for a place.
        return {"crs": self.crs} | ({} if self.missing else {"transform": transform})

    def copy_to(self, dataset: Any, window: Window, factor: int) -> None:
        """Give GCPs and RPCs to a file that shows a part of the raster.

        Args:
            window: The part, in pixels of the resolution that is read.
            factor: Pixels of the file along one of these.
        """
        # GeoTIFF holds a transform or GCPs.
        if self.points and not self.placed:
            points = [
                GroundControlPoint(row / factor - window.row, col / factor - window.col, x, y, z)
                for row, col, x, y, z in self.points
            ]
            dataset.gcps = points, self.points_crs or CRS()
        if self.rpcs is not None:
            rpcs = copy(self.rpcs)
            # RPCs count from the middle of the first pixel.
            rpcs.line_off = (rpcs.line_off + 0.5) / factor - window.row - 0.5
            rpcs.samp_off = (rpcs.samp_off + 0.5) / factor - window.col - 0.5
            rpcs.line_scale /= factor
            rpcs.samp_scale /= factor
            dataset.rpcs = rpcs


def georeferencing_of(dataset: Any) -> Georeferencing:
    """Georeferencing of an open file; GCPs and RPCs that are not numbers are left out."""
    points, points_crs = dataset.gcps
    if not all(isfinite(number) for p in points for number in (p.row, p.col, p.x, p.y)):
        points = []
    return Georeferencing(
        placed=dataset.transform != Affine.identity(),
        crs=_once(dataset.crs),
        transform=dataset.transform,
        points=tuple((p.row, p.col, p.x, p.y, p.z) for p in points),
        points_crs=points_crs,
        rpcs=_rpcs_of(dataset),
    )


@lru_cache(maxsize=64)
def _once(crs: CRS | None) -> CRS | None:
    """One object for all that are equal: ten thousand images have few, which are slow to pickle."""
    return crs


def _rpcs_of(dataset: Any) -> Any:
    try:
        rpcs = dataset.rpcs
        numbers = rpcs and (rpcs.line_off, rpcs.samp_off, rpcs.line_scale, rpcs.samp_scale)
        return rpcs if numbers and all(map(isfinite, numbers)) else None
    except (KeyError, IndexError, TypeError, ValueError):  # words, or some of them are missing
        return None
