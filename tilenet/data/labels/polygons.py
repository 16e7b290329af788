"""Labels burned from polygons, block by block: no vector becomes a raster of the whole image."""

from typing import Any

import numpy as np
from affine import Affine
from numpy.typing import NDArray
from rasterio.features import rasterize

from tilenet.data.labels.far_corners import without_far_corners
from tilenet.data.labels.source import LabelSource
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.data.labels.vector_layer import Polygons, VectorLayer
from tilenet.data.rasters.block_cache import BLOCKS, OWNERS
from tilenet.data.rasters.bounds import bounds_of
from tilenet.data.rasters.raster import Raster
from tilenet.geometry.pieces import pieces_of, within
from tilenet.geometry.windows import Window

# Blocks have fixed places, so that rounding, which decides the side of an edge that the middle of a
# pixel lies on, does not depend on the window.
BLOCK_PX = 512
# Burned around a block and cut off, so that GDAL's edge effects stay out of labels.
MARGIN_PX = 2


class VectorLabels(LabelSource):
    """Labels of the polygons of a vector layer; a context manager.

    A pixel is in a polygon if its middle is, or with `all_touched` any part of it.

    Args:
        path: Any file of polygons that GDAL reads.

    Raises:
        TilenetError: See `VectorLayer`.
    """

    def __init__(self, path: str, image: Raster, ignore_index: int, keys: VectorKeys) -> None:
        self.path, self.ignore_index, self.keys = path, ignore_index, keys
        self.layer = VectorLayer(path, image, keys)
        self._number = next(OWNERS)
        self._transform = image.transform
        self.height, self.width = image.size

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_number": next(OWNERS)}  # another rank's number is taken here

    def close(self) -> None:
        """Forget burned blocks; the file is only open while it is read."""
        BLOCKS.drop(self._number)

    def _read_inside(self, window: Window) -> NDArray[np.int64]:
        # By the row and the column of their blocks.
        pieces = {(p.row // BLOCK_PX, p.col // BLOCK_PX): p for p in pieces_of(window, BLOCK_PX)}
        pairs = ((place, BLOCKS.get(self._number, *place)) for place in pieces)
        blocks = {place: block for place, block in pairs if block is not None}
        missing = [place for place in pieces if place not in blocks]
        if missing:
            first, last = np.min(missing, axis=0), np.max(missing, axis=0) + 1
            polygons, classes = self._polygons(_pixels(*first, *(last - first)))
            for place in missing:
                blocks[place] = self._burn(polygons, classes, _pixels(*place, 1, 1))
                BLOCKS.put(self._number, *place, blocks[place])
        labels = np.empty((window.height, window.width), np.int64)
        for place, piece in pieces.items():
            labels[within(piece, window)] = blocks[place][within(piece, _pixels(*place, 1, 1))]
        return labels

    def _polygons(self, window: Window) -> tuple[Polygons, NDArray[np.int64]]:
        """Polygons of a window and their classes."""
        polygons = self.layer.polygons(bounds_of(self._transform, _with_margin(window)))
        keys = self.keys
        if keys.field is None:
            return polygons, np.full(len(polygons.values), keys.burn, np.int64)
        return polygons, np.array(
            keys.classes_of(polygons.values, self.ignore_index, self.path), np.int64
        )

    def _burn(
        self, polygons: Polygons, classes: NDArray[np.int64], window: Window
    ) -> NDArray[np.int64]:
        place = _with_margin(window)
        around = bounds_of(self._transform, place)
        left, bottom, right, top = polygons.bounds.T
        across = (left <= around.right) & (right >= around.left)
        near = np.flatnonzero(across & (bottom <= around.top) & (top >= around.bottom))
        background = self.keys.background_of(self.ignore_index)
        # Later ones over earlier ones: classes by their place in the order, then as in the file.
        order = {label: place for place, label in enumerate(self.keys.priority or [])}
        ranks = [order.get(int(classes[number]), -1) for number in near]
        near = near[np.argsort(ranks, kind="stable")]
        shapes = without_far_corners(polygons.shapes[near], self._transform, place)
        pairs = zip(shapes, classes[near].astype(float).tolist(), strict=True)
        reaching = [(shape, label) for shape, label in pairs if shape is not None]
        if not reaching:
            return np.full((window.height, window.width), background, np.int64)
        burned = rasterize(
            reaching,
            out_shape=(place.height, place.width),
            fill=background,
            transform=self._transform @ Affine.translation(place.col, place.row),
            all_touched=self.keys.all_touched,
            dtype="float64",  # holds every class number and ignore_index
        )
        inside = burned[MARGIN_PX:-MARGIN_PX, MARGIN_PX:-MARGIN_PX]
        labels: NDArray[np.int64] = inside.astype(np.int64)
        return labels


def _pixels(row: int, col: int, rows: int, cols: int) -> Window:
    """Pixels of a number of blocks."""
    return Window(*(int(number) * BLOCK_PX for number in (row, col, rows, cols)))


def _with_margin(window: Window) -> Window:
    row, col = window.row - MARGIN_PX, window.col - MARGIN_PX
    return Window(row, col, window.height + 2 * MARGIN_PX, window.width + 2 * MARGIN_PX)
