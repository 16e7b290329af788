"""Move polygons to an image's CRS: corner by corner as GDAL does it, unless that makes no sense."""

from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray
from rasterio.crs import CRS
from rasterio.warp import transform

from tilenet.data.rasters.bounds import Bounds, bounds_in, bounds_of, crs_name
from tilenet.data.rasters.opening import GDAL_ERRORS
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window

# GDAL counts pixels from the corner of its raster in 32 bits; shapes that reach further are cut.
REACH_PX = 2**29
MOST_BOXES = 1 << 16  # that are moved at once
# Sides and diagonals of a box, by its points of 3 x 3: column and row, column and row.
BOX_LINES = (0, 0, 0, 2), (2, 0, 2, 2), (0, 0, 2, 0), (0, 2, 2, 2), (0, 0, 2, 2), (0, 2, 2, 0)


def shapes_on_image(
    shapes: NDArray[Any], crs: CRS | None, image: Raster, path: str
) -> NDArray[Any]:
    """Move shapes into the CRS of an image; cut shapes that reach around the earth to its vicinity.

    Shape by shape: GDAL chooses among several ways from one CRS to another by the middle of its
    input, and that must not depend on which shapes are read together.

    Args:
        shapes: (N,), polygons and multi-polygons, none of them empty.

    Returns:
        (N,); empty where nothing lies around the image.

    Raises:
        TilenetError: There is no way from one CRS to the other.
    """
    # Of all of the image, so that labels of a part of it are those of the whole.
    size, transform_of_all = image.cut_from
    whole = bounds_of(transform_of_all, Window(0, 0, *size))
    reach = Window(-REACH_PX, -REACH_PX, 2 * REACH_PX, 2 * REACH_PX)
    limits = bounds_of(image.transform, reach)
    around = bounds_in(whole, image.crs, crs)
    around = around and around.wider(1)
    moved = np.empty(len(shapes), object)
    for number, shape in enumerate(shapes):
        moved_shape = _moved(shape, crs, image.crs)
        near = around is not None and _within(shape, around)
        if not _within(moved_shape, limits) or not (
            near or _is_straight(shape, moved_shape, crs, image.crs, whole)
        ):
            # Corners behind the earth have no place in the image's CRS, or a wrong one.
            moved_shape = around and _moved(_cut(shape, around), crs, image.crs)
        if moved_shape is None:
            raise TilenetError(
                f"labels must be in a CRS that can be moved to the image's ({path}: "
                f"{crs_name(crs)}, {image.path}: {crs_name(image.crs)}); reproject them with "
                "ogr2ogr -t_srs or QGIS"
            )
        moved[number] = moved_shape
    return moved


def bent_boxes(boxes: NDArray[np.float64], crs: CRS | None, image: Raster) -> NDArray[np.bool_]:
    """Whether lines in boxes bend by a pixel of the image when they are moved to its CRS, (N,).

    The sides and diagonals are looked at: other lines between two points of a box bend by at most
    a quarter more, as long as a bend is about as large as the square of the length.

    Args:
        boxes: (N, 4), left, bottom, right, top.
    """
    half = len(boxes) // 2
    moved = None
    if len(boxes) <= MOST_BOXES:
        x, y = (np.linspace(boxes[:, side], boxes[:, side + 2], 3) for side in (0, 1))
        points = np.stack(np.broadcast_arrays(x[:, None], y), axis=-1)
        moved = _corners(points.reshape(-1, 2), crs, image.crs)
    if moved is None and half:  # too many, or one has no place there
        return np.concatenate([bent_boxes(b, crs, image) for b in (boxes[:half], boxes[half:])])
    if moved is None:
        return np.ones(len(boxes), np.bool_)
    with np.errstate(invalid="ignore"):  # corners behind the earth are infinite
        pixels = np.stack(~image.transform @ tuple(moved.T), axis=-1).reshape(points.shape)
        bends = [
            pixels[(a + c) // 2, (b + d) // 2] - (pixels[a, b] + pixels[c, d]) / 2
            for a, b, c, d in BOX_LINES
        ]
    return np.asarray(~(np.abs(bends) < 1).all(axis=(0, 2)))


def _moved(shape: Any, source: CRS | None, target: CRS | None) -> Any:
    """A shape in another CRS; None: a corner has no place there."""
    if source == target or shape.is_empty:
        return shape
    corners = _corners(shapely.get_coordinates(shape), source, target)
    return None if corners is None else shapely.set_coordinates(shape, corners)


def _corners(
    corners: NDArray[np.float64], source: CRS | None, target: CRS | None
) -> NDArray[np.float64] | None:
    try:
        return np.column_stack(transform(source, target, *corners.T))
    except GDAL_ERRORS:
        return None


def _within(shape: Any, limits: Bounds) -> bool:
    if shape is None or not np.isfinite(shapely.get_coordinates(shape)).all():
        return False
    left, bottom, right, top = shape.bounds
    inside = left > limits.left and right < limits.right
    return bool(inside and bottom > limits.bottom and top < limits.top)


def _is_straight(
    shape: Any, moved_shape: Any, source: CRS | None, target: CRS | None, image: Bounds
) -> bool:
    """Whether edges are about as straight in the image's CRS as in their own.

    One around half the earth is not: it is nowhere near the line that GDAL draws from corner to
    corner.
    """
    if source == target:
        return True
    corners, ring = shapely.get_coordinates(_rings(shape), return_index=True)
    edges = ring[1:] == ring[:-1]
    middles = _corners(_middles(corners)[edges], source, target)
    if middles is None:
        return False
    straight = _middles(shapely.get_coordinates(_rings(moved_shape)))[edges]
    size = max(image.right - image.left, image.top - image.bottom)
    return bool((np.abs(middles - straight) < size).all())


def _cut(shape: Any, around: Bounds) -> Any:
    """The part of a shape that lies in a rectangle."""
    cut = shapely.intersection(shapely.make_valid(shape), shapely.box(*around))
    parts = shapely.get_parts(shapely.get_parts(cut))
    return shapely.multipolygons(parts[shapely.get_dimensions(parts) == 2])


def _rings(shape: Any) -> Any:
    return shapely.get_rings(shapely.get_parts(shapely.get_parts(shape)))


def _middles(corners: NDArray[np.float64]) -> NDArray[np.float64]:
    """Middles between corners and the next ones."""
    return np.asarray((corners[1:] + corners[:-1]) / 2)
