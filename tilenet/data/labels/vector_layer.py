"""Read the polygons of a vector layer where an image lies, in the image's CRS.

The only module that opens vector files.
"""

import difflib
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyogrio
import shapely
from numpy.typing import NDArray
from pyogrio.errors import DataLayerError, DataSourceError

from tilenet.data.labels.crs import crs_of_layer
from tilenet.data.labels.reproject import bent_boxes, shapes_on_image
from tilenet.data.labels.vector_keys import VectorKeys, text_of
from tilenet.data.rasters.bounds import Bounds, bounds_in, bounds_of
from tilenet.data.rasters.extent import check_longitudes, check_overlap
from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.remedies import VECTOR_INFO
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window

# Errors of pyogrio for GDAL's; ValueError for texts and geometries that it cannot decode.
VECTOR_ERRORS = (DataSourceError, DataLayerError, ValueError, OSError)


VALUES_AT_ONCE = 1 << 20


MENDED = ".*winding order|Non closed ring detected|Several features with id"


@dataclass(frozen=True)
class Polygons:
    """Polygons in the order of their file.

    Attributes:
        numbers: (N,), of the features, by the file.
        shapes: (N,), shapely's, in the image's CRS.
        values: (N,), values of the field, None without a field.
        bounds: (N, 4), left, bottom, right, top.
    """

    numbers: NDArray[np.int64]
    shapes: NDArray[Any]
    values: list[Any]
    bounds: NDArray[np.float64]


class VectorLayer:
    """A layer of a vector file, and the image that it labels.

    Attributes:
        bounds: Bounds of all its features.
        num_features: Number of features by the file; -1 where its format does not know.
        fields: Names of its attributes.
        crs: CRS of its coordinates.

    Args:
        path: Any file that GDAL reads; GeoPackage, GeoJSON, Shapefile, FlatGeobuf …

    Raises:
        TilenetError: The layer or field does not exist, the layer holds points or lines, names no
            CRS or another than `keys`, or lies elsewhere than the image.
    """

    def __init__(self, path: str, image: Raster, keys: VectorKeys) -> None:
        self.path, self.keys, self._image = path, keys, image
        self.name = _chosen(path, keys.layer)
        info = pyogrio.read_info(path, layer=self.name, force_total_bounds=True)
        if keys.field is not None and keys.field not in info["fields"]:
            near = difflib.get_close_matches(keys.field, info["fields"].tolist(), n=1, cutoff=0)
            raise TilenetError(
                f"vectors.field must be a field of the layer ({path}, layer {self.name}: no "
                f"{keys.field}); " + (f"the nearest is {near[0]}" if near else "it has no fields")
            )
        # Kinds without Polygon may hold some: Unknown, GeometryCollection.
        kind = str(info["geometry_type"])
        if "Point" in kind or "Line" in kind:
            raise _no_polygons(path, self.name, kind)
        bounds = info["total_bounds"]
        self.bounds = Bounds(*(np.inf,) * 4 if bounds is None else bounds)
        self.num_features, self.fields = int(info["features"]), tuple(map(str, info["fields"]))
        self.crs = crs_of_layer(path, info, keys.crs, self.bounds, image)
        check_longitudes(path, self.bounds, self.crs, image)
        # Without an index each query reads the whole file, so then it is read once and kept; of
        # others those are kept that an index does not find.
        self._indexed = bool(info["capabilities"]["fast_spatial_filter"])
        self._memory: Polygons | None = None
        try:
            check_overlap(path, self.bounds, self.crs, image)
        except TilenetError:
            if not self._reaches_image():
                raise

    def polygons(self, place: Bounds) -> Polygons:
        """Read polygons that reach into a rectangle in the image's CRS, and perhaps more.

        Args:
            place: With 2 pixels on each side of those that labels are for: a polygon is looked for
                where its edges lie in the layer's CRS, unless its bounds bend by a pixel.

        Raises:
            TilenetError: The file cannot be read there, or holds points or lines.
        """
        if self._memory is None:
            self._memory = self._read_bent() if self._indexed else self._read(self._image_place())
        if not self._indexed:
            return self._memory
        near, memory = self._read(place), self._memory
        numbers, order = np.unique(np.append(near.numbers, memory.numbers), return_index=True)
        values = near.values + memory.values
        return Polygons(
            numbers,
            np.append(near.shapes, memory.shapes)[order],
            [values[number] for number in order],
            np.concatenate([near.bounds, memory.bounds])[order],
        )

    def value_counts(self) -> Counter[str]:
        """Number of features of the whole layer with each value of the field (of `text_of`).

        Raises:
            TilenetError: The file cannot be read.
        """
        counts: Counter[str] = Counter()
        first = 0
        while True:
            *_, columns = self._read_raw(
                columns=[self.keys.field],
                read_geometry=False,
                skip_features=first,
                max_features=VALUES_AT_ONCE,
            )
            values = columns[0].tolist()
            counts.update(map(text_of, values))
            first += len(values)
            if len(values) < VALUES_AT_ONCE:
                return counts

    def _read_raw(self, **options: Any) -> tuple[Any, Any, Any]:
        """Numbers of features, their shapes and the columns of fields, as `pyogrio.raw.read` does.

        Raises:
            TilenetError: The file cannot be read.
        """
        with self._reading():
            _, fids, wkb, columns = pyogrio.raw.read(self.path, layer=self.name, **options)
            return fids, shapely.from_wkb(wkb, on_invalid="fix"), columns

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            with warnings.catch_warnings():
                # Mended while reading, and said by every rank.
                warnings.filterwarnings("ignore", MENDED, RuntimeWarning)
                yield
        except (*VECTOR_ERRORS, shapely.errors.ShapelyError) as error:
            raise TilenetError(
                f"a vector file must be readable everywhere ({self.path}, layer {self.name}: "
                f"{' '.join(str(error).split())}); copy the file again or check it with "
                f"{VECTOR_INFO}"
            ) from error

    def _image_place(self) -> Bounds:
        image = self._image
        return bounds_of(image.transform, Window(-2, -2, image.height + 4, image.width + 4))

    def _reach(self) -> Bounds | None:
        """Where polygons that reach into the image lie in the layer's CRS; None: anywhere.

        Edges that bend by more than all of the image are cut (`shapes_on_image`).
        """
        image, place = self._image, self._image_place()
        size, transform = image.cut_from
        left, bottom, right, top = bounds_of(transform, Window(0, 0, *size))
        far = max(right - left, top - bottom)
        left, bottom, right, top = place
        around = Bounds(left - far, bottom - far, right + far, top + far)
        own, wide = (bounds_in(each, image.crs, self.crs) for each in (place, around))
        if own is None or wide is None:
            return None
        # Around an image of half the earth longitudes begin again: its own box must be in it.
        (left, bottom), (right, top) = map(min, own[:2], wide[:2]), map(max, own[2:], wide[2:])
        return Bounds(left, bottom, right, top)

    def _reaches_image(self) -> bool:
        """Whether a polygon does once its corners are moved, as one with long edges may."""
        if self.crs == self._image.crs:
            return False
        place = self._image_place()
        return any(place.meets(Bounds(*bounds)) for bounds in self.polygons(place).bounds)

    def _read_bent(self) -> Polygons:
        """Polygons around the image whose edges may lie a pixel off those in the layer's CRS."""
        reach = self._reach()
        bent: list[int] = []
        if self.crs != self._image.crs:
            with self._reading():
                # All at once, 40 bytes each: pyogrio 0.13 reads no first part of them.
                bbox = None if reach is None else tuple(reach)
                fids, boxes = pyogrio.read_bounds(self.path, layer=self.name, bbox=bbox)
            bent = fids[bent_boxes(boxes.T, self.crs, self._image)].tolist()
        return self._read(None, bent)

    def _read(self, place: Bounds | None, numbers: list[int] | None = None) -> Polygons:
        """Polygons that meet a place in the image's CRS, or those of some features."""
        box = place and bounds_in(place, self._image.crs, self.crs)
        moves = self.crs != self._image.crs
        bbox = self._reach() if place and moves and not self._indexed else box
        field = self.keys.field
        fids, shapes, columns = self._read_raw(
            columns=[] if field is None else [field],
            bbox=None if bbox is None else tuple(bbox),
            fids=numbers,
            force_2d=True,
            return_fids=True,
        )
        # An index gives them in its own order.
        order = np.argsort(fids, kind="stable") if self._indexed else np.arange(len(fids))
        order = order[~shapely.is_missing(shapes[order]) & ~shapely.is_empty(shapes[order])]
        if bbox != box and box is not None:
            boxes = shapely.bounds(shapes[order])
            met = (boxes[:, :2] <= box[2:]).all(axis=1) & (boxes[:, 2:] >= box[:2]).all(axis=1)
            order = order[met | bent_boxes(boxes, self.crs, self._image)]
        shapes = shapes[order]
        parts = shapely.get_parts(shapely.get_parts(shapes))  # collections of multi-polygons
        # Before anything is computed from them: GEOS raises errors of its own.
        corners, owner = shapely.get_coordinates(shapes, return_index=True)
        endless = owner[~np.isfinite(corners).all(axis=1)]
        if len(endless):
            raise TilenetError(
                f"corners of polygons must be numbers ({self.path}, layer {self.name}: not those "
                f"of feature {fids[order][endless[0]]}); draw it again or delete it"
            )
        # No deeper collections are burned.
        nested = shapely.get_type_id(parts) == shapely.GeometryType.GEOMETRYCOLLECTION
        flat = parts[(shapely.get_dimensions(parts) < 2) | nested]
        if len(flat):
            raise _no_polygons(self.path, self.name, flat[0].geom_type)
        shapes = shapes_on_image(shapes, self.crs, self._image, self.path)
        non_empty = ~shapely.is_empty(shapes)
        values = [None] * len(order) if field is None else columns[0][order].tolist()
        return Polygons(
            fids[order][non_empty],
            shapes[non_empty],
            [value for value, stays in zip(values, non_empty, strict=True) if stays],
            shapely.bounds(shapes[non_empty]),
        )


def _chosen(path: str, layer: str | None) -> str:
    """The layer of this name, or the only one with geometries."""
    layers = {str(name): kind for name, kind in pyogrio.list_layers(path)}
    names = [name for name, kind in layers.items() if kind is not None]
    if layer is not None and layer not in names:
        raise TilenetError(
            f"vectors.layer must be a layer with geometries ({path}: no {layer}); it has "
            f"{', '.join(names) or 'none'}"
        )
    if layer is None and len(names) != 1:
        raise TilenetError(
            f"labels come from one layer ({path} has {len(names)}: {', '.join(names)}); name it "
            "with vectors.layer"
        )
    return layer or names[0]


def _no_polygons(path: str, layer: str, kind: str) -> TilenetError:
    return TilenetError(
        f"vector labels must be polygons ({path}, layer {layer}: {kind}); buffer them to their "
        "width on the ground (QGIS: Buffer, PostGIS or ogr2ogr -dialect sqlite: ST_Buffer, "
        "Python: shapely.buffer)"
    )
