"""Polygons without corners far from a window: what is burned in the window is the same to the bit.

GDAL burns a pixel where its row crosses an odd number of edges on the pixel's left, and looks at
each edge by itself. Let consecutive corners lie above the window: edges between them cross none of
its rows, nor does the edge from the first to the last of them. Let them lie on its left: their
edges cross a row an odd number of times where that one edge does, and all on the left. So of
consecutive corners on one side of the window the first and the last will do; no corner moves.

Of edges that lie along a row GDAL burns those of one direction, seen as the ring turns: by its
lowest corner and the two next to it, or by the sign of its area. A ring of which these would not
stay or do not agree, as of some that cross themselves, keeps all corners.

A polygon of 100 000 corners takes GDAL and Python 100 ms for each window otherwise.
"""

from typing import Any

import numpy as np
import shapely
from affine import Affine
from numpy.typing import NDArray

from tilenet.geometry.windows import Window

FAR_PX = 2  # from the window: nothing rounds across so much
MOST_NESTED = 3  # a multipolygon in a collection in a collection
LEAST_CORNERS = 4
ROUNDING = 1e-12  # of sums of areas, relative to their terms


def without_far_corners(
    shapes: NDArray[Any], transform: Affine, window: Window
) -> list[dict[str, Any] | None]:
    """Polygons as GeoJSON has them, with the corners that pixels of a window depend on.

    Args:
        shapes: (N,), shapely's polygons, multipolygons and collections of these or of collections
            of these, valid or not.
        transform: From columns and rows of pixels to coordinates.

    Returns:
        One per shape; None: nothing of it is in the window.
    """
    parts, shape_of = shapes, np.arange(len(shapes))
    for _ in range(MOST_NESTED):
        parts, part_of = shapely.get_parts(parts, return_index=True)
        shape_of = shape_of[part_of]
    rings, part_of = shapely.get_rings(parts, return_index=True)
    corners, ring_of = shapely.get_coordinates(rings, return_index=True)
    if not len(corners):
        return [None] * len(shapes)
    needed = _needed(corners, ring_of, transform, window)
    ring_of, corners = ring_of[needed], corners[needed]
    starts = np.flatnonzero(np.diff(ring_of, prepend=-1))
    by_part: dict[int, list[Any]] = {}
    for ring in np.split(np.arange(len(corners)), starts[1:]) if len(corners) else ():
        coordinates = corners[ring].tolist()
        # rasterio leaves out shapes whose first ring has fewer corners.
        coordinates += coordinates[-1:] * (LEAST_CORNERS - len(coordinates))
        by_part.setdefault(int(part_of[ring_of[ring[0]]]), []).append(coordinates)
    polygons: list[list[Any]] = [[] for _ in shapes]
    for part, of_part in by_part.items():
        polygons[shape_of[part]].append(of_part)
    return [{"type": "MultiPolygon", "coordinates": some} if some else None for some in polygons]


def _needed(
    corners: NDArray[np.float64], ring_of: NDArray[np.int64], transform: Affine, window: Window
) -> NDArray[np.bool_]:
    """Which of the corners (N, 2) of closed rings are needed."""
    cols, rows = ~transform @ tuple(corners.T)
    sides = np.array(
        (
            rows < window.row - FAR_PX,
            rows > window.row + window.height + FAR_PX,
            cols < window.col - FAR_PX,
            cols > window.col + window.width + FAR_PX,
        )
    )
    first = np.diff(ring_of, prepend=-1) != 0
    starts, ring_of = np.flatnonzero(first), np.cumsum(first) - 1  # rings may be empty
    lowest = _lowest(corners, ring_of, starts)
    stays = np.zeros(len(corners), np.bool_)
    stays[lowest] = True
    rest = np.arange(len(corners))
    # One side after another, each on what the last one left: at once, a corner beyond two sides
    # could be left out though consecutive ones end there on both.
    for side in sides:
        beyond, ring = side[rest], ring_of[rest]
        amid = beyond[1:-1] & beyond[:-2] & beyond[2:] & ~stays[rest[1:-1]]
        amid &= (ring[1:-1] == ring[:-2]) & (ring[1:-1] == ring[2:])
        rest = np.delete(rest, 1 + np.flatnonzero(amid))
    needed = np.zeros(len(corners), np.bool_)
    needed[rest] = True
    before, at, after = corners[lowest]
    turn = np.sign(_cross(after - at, before - at))
    turns = _turns(corners, ring_of), _turns(corners[rest], ring_of[rest])
    unsure = np.any([turn * other <= 0 for other in turns], axis=0)
    needed |= unsure[ring_of]
    apart = np.any(np.logical_and.reduceat(sides, starts, axis=1), axis=0)
    needed &= ~apart[ring_of]
    return needed


def _lowest(
    corners: NDArray[np.float64], ring_of: NDArray[np.int64], starts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Numbers (3, rings) of each ring's lowest corner, the rightmost such, amid its neighbours."""
    sizes = np.diff(starts, append=len(corners)) - 1  # the last corner is the first again
    x, y = corners.T
    right = np.where(y == np.minimum.reduceat(y, starts)[ring_of], x, -np.inf)
    such = np.flatnonzero(right == np.maximum.reduceat(right, starts)[ring_of])
    lowest = such[np.searchsorted(ring_of[such], np.arange(len(starts)))] - starts
    places = np.array([lowest - 1, lowest, lowest + 1])
    return np.asarray(starts + places % sizes)


def _turns(corners: NDArray[np.float64], ring_of: NDArray[np.int64]) -> NDArray[np.float64]:
    """Signs of the areas of closed rings: 1 where they turn left; 0 where rounding decides."""
    starts = np.flatnonzero(np.diff(ring_of, prepend=-1))
    around = corners - corners[starts][ring_of]
    terms = _cross(around, np.roll(around, -1, axis=0))
    terms[[*(starts[1:] - 1), -1]] = 0  # from a ring's last corner to the next ring's first
    areas = np.add.reduceat(terms, starts)
    # GDAL's terms, which are of corners as they are.
    terms = np.abs(corners[:, 0] * np.diff(corners[:, 1], append=corners[-1, 1]))
    terms[[*(starts[1:] - 1), -1]] = 0
    return np.where(np.abs(areas) > ROUNDING * np.add.reduceat(terms, starts), np.sign(areas), 0)


def _cross(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
