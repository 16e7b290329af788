"""Make polygons of the blocks of a class map, and join those that a block's edge cuts.

All coordinates are columns and rows of pixels: whole numbers, so that joined edges fit exactly.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import shapely
from affine import Affine
from numpy.typing import NDArray
from rasterio.features import shapes as polygonise

from tilenet.data.rasters.raster import Raster
from tilenet.geometry.pieces import pieces_of
from tilenet.geometry.windows import Window
from tilenet.mapping.polygons.corners import build_polygons, drop_straight_points
from tilenet.mpi import Comm

BLOCK_PX = 2048
MESSAGE_POINTS = 1 << 24  # 16 bytes each: MPI counts to 2³¹ − 1


@dataclass(frozen=True)
class ClassPolygons:
    """Polygons of classes.

    Attributes:
        shapes: (N,), shapely's, x: column, y: row; their rings begin at the left, where it is
            highest, so that they are the same however they were cut.
        classes: (N,), their numbers.
    """

    shapes: NDArray[Any]
    classes: NDArray[np.int32]

    def take(self, which: NDArray[Any]) -> "ClassPolygons":
        """The polygons at the given places."""
        return ClassPolygons(self.shapes[which], self.classes[which])

    @staticmethod
    def concatenate(parts: Sequence["ClassPolygons"]) -> "ClassPolygons":
        """The polygons of all parts."""
        shapes = [np.empty(0, object), *(part.shapes for part in parts)]
        classes = [np.empty(0, np.int32), *(part.classes for part in parts)]
        return ClassPolygons(np.concatenate(shapes), np.concatenate(classes))


def band_of(size: tuple[int, int], rank: int, ranks: int) -> Window:
    """The rows of a map that a rank takes; 0 rows where it has fewer rows than ranks."""
    first, end = rank * size[0] // ranks, (rank + 1) * size[0] // ranks
    return Window(first, 0, end - first, size[1])


def make_band_polygons(
    mapped: Raster,
    band: Window,
    classes: NDArray[np.int32] | None,
    part_done: Callable[[], None] = lambda: None,
) -> ClassPolygons:
    """Polygons of a band of the map, whole but for its upper and lower edge.

    Args:
        classes: Classes to make polygons of; None: all.
        part_done: Is called after each block, and may end the work.

    Raises:
        TilenetError: The map cannot be read.
    """
    whole, cut = list[ClassPolygons](), list[ClassPolygons]()
    for block in pieces_of(band, BLOCK_PX):
        pixels = mapped.read(block)
        values, valid = pixels.values[0].astype(np.int32), pixels.valid
        mask = valid if classes is None else valid & np.isin(values, classes)
        polygons = _make_block_polygons(values, mask, block)
        is_cut = find_cut(polygons.shapes, block, mapped.size)
        whole.append(polygons.take(~is_cut))
        cut.append(polygons.take(is_cut))
        part_done()
    return ClassPolygons.concatenate([*whole, join(ClassPolygons.concatenate(cut))])


def _make_block_polygons(
    values: NDArray[np.int32], mask: NDArray[np.bool_], block: Window
) -> ClassPolygons:
    # As flat numbers at once: GDAL's tuples take twelve times their bytes.
    points, lengths, owners, classes = array("d"), array("q"), array("q"), array("i")
    place = Affine.translation(block.col, block.row)
    for shape, value in polygonise(values, mask, connectivity=4, transform=place):
        for ring in shape["coordinates"]:
            points.extend(chain.from_iterable(ring))
            lengths.append(len(ring))
            owners.append(len(classes))
        classes.append(int(value))
    rings = np.repeat(np.arange(len(lengths)), lengths)
    shapes = build_polygons(np.array(points).reshape(-1, 2), rings, np.array(owners))
    return ClassPolygons(shapely.normalize(shapes), np.array(classes, np.int32))


def find_cut(shapes: NDArray[Any], window: Window, size: tuple[int, int]) -> NDArray[np.bool_]:
    """Whether polygons within a window touch an edge of it that is not the map's."""
    left, top, right, bottom = shapely.bounds(shapes).T
    below, beyond = window.row + window.height, window.col + window.width
    rows = ((top == window.row) & (window.row > 0)) | ((bottom == below) & (below < size[0]))
    cols = ((left == window.col) & (window.col > 0)) | ((right == beyond) & (beyond < size[1]))
    return np.asarray(rows | cols)


def join(cut: ClassPolygons) -> ClassPolygons:
    """Join polygons of one class that have an edge in common; a common corner does not join them.

    GEOS finds which hang together, and dissolves those alone. A valid polygon's inside hangs
    together by edges, so the parts of the result are the 4-connected patches of pixels.
    """
    parts = []
    for number in np.unique(cut.classes):
        union = shapely.disjoint_subset_union_all(cut.shapes[cut.classes == number])
        shapes = shapely.normalize(drop_straight_points(shapely.get_parts(union)))
        parts.append(ClassPolygons(shapes, np.full(len(shapes), number, np.int32)))
    return ClassPolygons.concatenate(parts)


def gather(mine: ClassPolygons, comm: Comm) -> ClassPolygons:
    """Polygons of all ranks on rank 0; on the others no polygons. Collective."""
    if comm.rank:
        ends = np.cumsum(shapely.get_num_coordinates(mine.shapes)) // MESSAGE_POINTS
        for part in np.split(np.arange(len(ends)), np.flatnonzero(np.diff(ends)) + 1):
            comm.send((shapely.to_wkb(mine.shapes[part]), mine.classes[part]), 0)
        comm.send(None, 0)
        return ClassPolygons.concatenate([])
    parts = [mine]
    for rank in range(1, comm.size):
        while (part := comm.recv(source=rank)) is not None:
            parts.append(ClassPolygons(shapely.from_wkb(part[0]), part[1]))
    return ClassPolygons.concatenate(parts)
