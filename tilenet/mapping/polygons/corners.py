"""Corners of polygons with edges along rows and columns of pixels."""

from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray


def build_polygons(
    points: NDArray[np.float64], rings: NDArray[np.int64], shapes: NDArray[np.int64]
) -> NDArray[Any]:
    """Polygons of their points.

    Args:
        points: (N, 2), of one ring after another; the point that closes a ring may be left out.
        rings: (N,), number of each point's ring, from 0.
        shapes: (R,), number of each ring's polygon, from 0; its first ring is the outer one.
    """
    return np.asarray(shapely.polygons(shapely.linearrings(points, indices=rings), indices=shapes))


def drop_straight_points(shapes: NDArray[Any]) -> NDArray[Any]:
    """The same polygons without points in the middle of an edge."""
    starts, ends, rings, owners = _list_edges(shapes)
    along = (starts == ends).argmax(axis=1)
    first = np.diff(rings, prepend=-1) > 0
    last = np.flatnonzero(np.append(first[1:], True))
    before = np.roll(along, 1)
    before[first] = along[last]
    corner = along != before
    return build_polygons(starts[corner], rings[corner], owners)


def add_met_corners(shapes: NDArray[Any]) -> NDArray[Any]:
    """The same polygons with a point wherever an edge passes a corner of another one.

    `shapely.coverage_simplify` takes edges for shared that have the same points.

    Args:
        shapes: Polygons that do not overlap, with points at corners alone.
    """
    starts, ends, rings, owners = _list_edges(shapes)
    low, high = np.minimum(starts, ends), np.maximum(starts, ends)
    line = int(high.max()) + 1  # places of a line, where lines stand one after another
    passed = np.zeros(len(starts), np.int64)
    offsets = np.zeros(len(starts), np.int64)
    sorted_corners: list[NDArray[np.float64]] = []
    for axis in (0, 1):  # edges on which x is the same, then y
        keys = np.unique(starts[:, axis] * line + starts[:, 1 - axis])
        on = starts[:, axis] == ends[:, axis]
        begin, end = (corner[on, axis] * line + corner[on, 1 - axis] for corner in (low, high))
        after = np.searchsorted(keys, begin, side="right")
        passed[on] = np.searchsorted(keys, end) - after
        offsets[on] = after + sum(len(corners_of_axis) for corners_of_axis in sorted_corners)
        places = np.empty((len(keys), 2))
        places[:, axis], places[:, 1 - axis] = np.divmod(keys, line)
        sorted_corners.append(places)
    # Of each edge its start, then the corners that it passes, in its direction.
    edge = np.repeat(np.arange(len(starts)), passed + 1)
    step = np.arange(len(edge)) - np.repeat(np.cumsum(passed + 1) - passed - 1, passed + 1)
    back = np.asarray((starts > ends).any(axis=1))[edge]
    number = offsets[edge] + np.where(back, passed[edge] - step, step - 1)
    corners = np.concatenate(sorted_corners)
    points = np.where((step == 0)[:, None], starts[edge], corners[np.where(step, number, 0)])
    return build_polygons(points, rings[edge], owners)


def _list_edges(
    shapes: NDArray[Any],
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64], NDArray[np.int64]]:
    """Starts and ends (N, 2) of edges, in order, the ring of each, and the polygon of each ring."""
    rings, owners = shapely.get_rings(shapes, return_index=True)
    points, of_ring = shapely.get_coordinates(rings, return_index=True)
    inside = of_ring[1:] == of_ring[:-1]
    return points[:-1][inside], points[1:][inside], of_ring[:-1][inside], owners
