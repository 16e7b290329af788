"""Read the polygons of a vector layer where an image lies, in the image's CRS.

The only module that opens vector files.
"""

import difflib
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyogrio
import shapely
from numpy.typing import NDArray
from pyogrio.errors import DataLayerError, DataSourceError

from tilenet.data.labels.crs import crs_of_layer
from tilenet.data.labels.reproject import shapes_on_image
from tilenet.data.labels.vector_keys import VectorKeys, text_of
from tilenet.data.rasters.bounds import Bounds, bounds_in, bounds_of
from tilenet.data.rasters.extent import check_longitudes, check_overlap
from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.remedies import VECTOR_INFO
from tilenet.errors import TilenetError

# Errors of pyogrio for GDAL's; ValueError for texts and geometries that it cannot decode.
VECTOR_ERRORS = (DataSourceError, DataLayerError, ValueError, OSError)


VALUES_AT_ONCE = 1 << 20


MENDED = ".*winding order|Non closed ring detected|Several features with id"


@dataclass(frozen=True)
class Polygons:
    """Polygons in the order of their file.

    Attributes:
        shapes: (N,), shapely's, in the image's CRS.
        values: (N,), values of the field, None without a field.
        bounds: (N, 4), left, bottom, right, top.
    """

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
        check_overlap(path, self.bounds, self.crs, image)
        # Without an index each query reads the whole file, so then it is read once and kept.
        self._indexed = bool(info["capabilities"]["fast_spatial_filter"])
        self._all: Polygons | None = None

    def polygons(self, place: Bounds) -> Polygons:
        """Read polygons with bounds that meet a rectangle in the image's CRS, and perhaps more.

        Raises:
            TilenetError: The file cannot be read there, or holds points or lines.
        """
        if self._indexed:
            return self._read(place)
        if self._all is None:
            image = self._image
            self._all = self._read(bounds_of(image.transform, image.whole).wider(0.01))
        return self._all

    def value_counts(self) -> Counter[str]:
        """Number of features of the whole layer with each value of the field (of `text_of`).

        Raises:
            TilenetError: The file cannot be read.
        """
        counts: Counter[str] = Counter()
        first = 0
        while True:
            *_, columns = self._raw(
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

    def _raw(self, **options: Any) -> tuple[Any, Any, Any]:
        """Numbers of features, their shapes and the columns of fields, as `pyogrio.raw.read` does.

        Raises:
            TilenetError: The file cannot be read.
        """
        try:
            with warnings.catch_warnings():
                # Mended while reading, and said by every rank.
                warnings.filterwarnings("ignore", MENDED, RuntimeWarning)
                _, fids, wkb, columns = pyogrio.raw.read(self.path, layer=self.name, **options)
            return fids, shapely.from_wkb(wkb, on_invalid="fix"), columns
        except (*VECTOR_ERRORS, shapely.errors.ShapelyError) as error:
            raise TilenetError(
                f"a vector file must be readable everywhere ({self.path}, layer {self.name}: "
                f"{' '.join(str(error).split())}); copy the file again or check it with "
                f"{VECTOR_INFO}"
            ) from error

    def _read(self, place: Bounds) -> Polygons:
        bbox = bounds_in(place, self._image.crs, self.crs)
        field = self.keys.field
        fids, shapes, columns = self._raw(
            columns=[] if field is None else [field],
            bbox=None if bbox is None else tuple(bbox),
            force_2d=True,
            return_fids=True,
        )
        # An index gives them in its own order.
        order = np.argsort(fids, kind="stable") if self._indexed else np.arange(len(fids))
        order = order[~shapely.is_missing(shapes[order]) & ~shapely.is_empty(shapes[order])]
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
