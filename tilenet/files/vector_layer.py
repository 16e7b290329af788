"""Read the polygons of a vector layer where an image lies, in the image's CRS.

The only module that opens vector files.
"""

import difflib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyogrio
import shapely
from numpy.typing import NDArray
from pyogrio.errors import DataLayerError, DataSourceError
from rasterio.crs import CRS
from rasterio.errors import CRSError
from rasterio.warp import transform

from tilenet.errors import TilenetError
from tilenet.files.extents import Bounds, bounds_in, bounds_of, check_overlap, crs_name
from tilenet.files.raster import GDAL_ERRORS, Raster
from tilenet.files.vector_keys import VectorKeys
from tilenet.geometry.tiles import Window

__all__ = ["VECTOR_ERRORS", "Polygons", "VectorLayer"]

# What pyogrio raises for GDAL's errors; ValueError for texts and geometries that it cannot decode.
VECTOR_ERRORS = (DataSourceError, DataLayerError, ValueError, OSError)

# GDAL counts pixels from the corner of what it burns in 32 bits; what reaches further is cut off.
REACH_PX = 2**29


@dataclass(frozen=True)
class Polygons:
    """Polygons in the order of their file.

    Attributes:
        shapes: (N,), shapely's, in the image's CRS.
        values: (N,), of the field; none without one.
        bounds: (N, 4), left, bottom, right, top.
    """

    shapes: NDArray[Any]
    values: list[Any]
    bounds: NDArray[np.float64]


class VectorLayer:
    """A layer of a vector file, and the image that it labels.

    Args:
        path: Any file that GDAL reads; GeoPackage, GeoJSON, Shapefile, FlatGeobuf …
        image: The image.
        keys: Which layer, field and CRS.

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
        self.crs = _crs_of(path, info, keys.crs, self.bounds, image)
        check_overlap(path, self.bounds, self.crs, image)
        # Without an index each query reads the whole file, so then it is read once and kept.
        self._indexed = bool(info["capabilities"]["fast_spatial_filter"])
        self._kept: Polygons | None = None

    def polygons(self, place: Bounds) -> Polygons:
        """Polygons whose bounds meet a rectangle in the image's CRS, and perhaps a few more.

        Raises:
            TilenetError: The file cannot be read there, or holds points or lines.
        """
        if self._indexed:
            return self._read(place)
        if self._kept is None:
            image = self._image
            self._kept = self._read(bounds_of(image.transform, image.whole).wider(0.01))
        return self._kept

    def _read(self, place: Bounds) -> Polygons:
        there = bounds_in(place, self._image.crs, self.crs)
        field = self.keys.field
        try:
            _, fids, wkb, columns = pyogrio.raw.read(
                self.path,
                layer=self.name,
                columns=[] if field is None else [field],
                bbox=None if there is None else tuple(there),
                force_2d=True,
                return_fids=True,
            )
            shapes = shapely.from_wkb(wkb, on_invalid="fix")
        except (*VECTOR_ERRORS, shapely.errors.ShapelyError) as error:
            raise TilenetError(
                f"a vector file must be readable everywhere ({self.path}, layer {self.name}: "
                f"{' '.join(str(error).split())}); copy the file again or check it with ogrinfo -al"
            ) from error
        # An index gives them in its own order.
        order = np.argsort(fids, kind="stable") if self._indexed else np.arange(len(fids))
        order = order[~shapely.is_missing(shapes[order]) & ~shapely.is_empty(shapes[order])]
        shapes = shapes[order]
        parts = shapely.get_parts(shapely.get_parts(shapes))  # collections of multi-polygons
        # Before anything is computed of them: GEOS raises errors of its own.
        endless = ~np.isfinite(shapely.bounds(shapes)).all(axis=1)
        if endless.any():
            raise TilenetError(
                f"corners of polygons must be numbers ({self.path}, layer {self.name}: not those "
                f"of feature {fids[order][endless][0]}); draw it again or delete it"
            )
        flat = parts[shapely.get_dimensions(parts) < 2]
        if len(flat):
            raise _no_polygons(self.path, self.name, flat[0].geom_type)
        shapes = self._moved(shapes)
        there_still = ~shapely.is_empty(shapes)
        values = [None] * len(order) if field is None else columns[0][order].tolist()
        return Polygons(
            shapes[there_still],
            [value for value, kept in zip(values, there_still, strict=True) if kept],
            shapely.bounds(shapes[there_still]),
        )

    def _moved(self, shapes: NDArray[Any]) -> NDArray[Any]:
        """Shapes in the image's CRS, corner by corner as GDAL does it.

        Shape by shape: GDAL chooses among several ways from one CRS to another by the middle of
        what it is given, and that must not depend on the window.
        """
        reach = Window(-REACH_PX, -REACH_PX, 2 * REACH_PX, 2 * REACH_PX)
        limits = bounds_of(self._image.transform, reach)
        moved = np.empty(len(shapes), object)
        for number, shape in enumerate(shapes):
            there = self._to_image(shape)
            if not _within(there, limits) or self._bends(shape, there):
                there = self._to_image(self._cut(shape))
            if there is None:
                raise self._cannot_be_moved()
            moved[number] = there
        return moved

    def _to_image(self, shape: Any) -> Any:
        """A shape in the image's CRS; None: a corner has no place there."""
        if self.crs == self._image.crs or shape.is_empty:
            return shape
        there = self._corners_in_image(shapely.get_coordinates(shape))
        return None if there is None else shapely.set_coordinates(shape, there)

    def _corners_in_image(self, corners: NDArray[np.float64]) -> NDArray[np.float64] | None:
        try:
            return np.column_stack(transform(self.crs, self._image.crs, *corners.T))
        except GDAL_ERRORS:
            return None

    def _bends(self, shape: Any, there: Any) -> bool:
        """Whether an edge that is straight in its own CRS leads past the image in the image's.

        An edge around half the earth does: between its corners it is nowhere near the line that
        GDAL draws.
        """
        if self.crs == self._image.crs or shape.is_empty:
            return False
        corners, ring = shapely.get_coordinates(_rings(shape), return_index=True)
        edges = ring[1:] == ring[:-1]
        middles = self._corners_in_image(_middles(corners)[edges])
        if middles is None:
            return True
        straight = _middles(shapely.get_coordinates(_rings(there)))[edges]
        around = bounds_of(self._image.transform, self._image.whole)
        size = max(around.right - around.left, around.top - around.bottom)
        return not (np.abs(middles - straight) < size).all()

    def _cut(self, shape: Any) -> Any:
        """What of a shape lies around the image: corners behind the earth have no place there."""
        image = self._image
        there = bounds_in(bounds_of(image.transform, image.whole), image.crs, self.crs)
        if there is None:
            raise self._cannot_be_moved()
        cut = shapely.intersection(shapely.make_valid(shape), shapely.box(*there.wider(1)))
        parts = shapely.get_parts(shapely.get_parts(cut))
        return shapely.multipolygons(parts[shapely.get_dimensions(parts) == 2])

    def _cannot_be_moved(self) -> TilenetError:
        return TilenetError(
            f"labels must be in a CRS that can be moved to the image's ({self.path}: "
            f"{crs_name(self.crs)}, {self._image.path}: {crs_name(self._image.crs)}); reproject "
            "them with ogr2ogr -t_srs"
        )


def _rings(shape: Any) -> Any:
    return shapely.get_rings(shapely.get_parts(shapely.get_parts(shape)))


def _middles(corners: NDArray[np.float64]) -> NDArray[np.float64]:
    """Middles between corners and the next ones."""
    return np.asarray((corners[1:] + corners[:-1]) / 2)


def _within(shape: Any, limits: Bounds) -> bool:
    if shape is None or not np.isfinite(shapely.get_coordinates(shape)).all():
        return False
    left, bottom, right, top = shape.bounds
    inside = left > limits.left and right < limits.right
    return bool(inside and bottom > limits.bottom and top < limits.top)


def _chosen(path: str, wanted: str | None) -> str:
    """The layer that is wanted, or the only one with geometries."""
    layers = {str(name): kind for name, kind in pyogrio.list_layers(path)}
    names = [name for name, kind in layers.items() if kind is not None]
    if wanted is not None and wanted not in names:
        raise TilenetError(
            f"vectors.layer must be a layer with geometries ({path}: no {wanted}); it has "
            f"{', '.join(names) or 'none'}"
        )
    if wanted is None and len(names) != 1:
        raise TilenetError(
            f"labels come from one layer ({path} has {len(names)}: {', '.join(names)}); name it "
            "with vectors.layer"
        )
    return wanted or names[0]


def _crs_of(
    path: str, info: dict[str, Any], given: str | None, bounds: Bounds, image: Raster
) -> CRS | None:
    """The CRS of a layer: what its file says, or the user where it says nothing."""
    own = _own_crs(info)
    degrees = Bounds(-180.0, -90.0, 180.0, 90.0).wider(0.01)
    # GeoJSON without one is in degrees (RFC 7946); many files are not.
    assumed = info["driver"] == "GeoJSON" and own == CRS.from_epsg(4326)
    if assumed and bounds.finite and not _inside(bounds, degrees):
        if given is None:
            raise TilenetError(
                f"GeoJSON without a CRS is in degrees (RFC 7946; {path}: {bounds}); name the CRS "
                "that it is in with vectors.crs (EPSG:…, or image: the image's)"
            )
        own = None
    if given is None:
        if own is None and image.crs is not None:
            raise TilenetError(
                f"vector labels need a CRS ({path}, layer {info['layer_name']}: none); name it "
                "with vectors.crs (EPSG:…, or image: the image's)"
            )
        if own is not None and image.crs is None:
            raise TilenetError(
                f"an image with vector labels needs a CRS ({image.path}: none, {path}: "
                f"{crs_name(own)}); give it one with gdal_edit -a_srs"
            )
        return own
    try:
        wanted = image.crs if given == "image" else CRS.from_user_input(given)
    except CRSError as error:
        raise TilenetError(
            f"vectors.crs must be a CRS (vectors.crs: {given}); write EPSG:…, WKT, or image"
        ) from error
    if own is not None and own != wanted:
        raise TilenetError(
            f"vectors.crs may not contradict the file's CRS (vectors.crs: {given}, {path}: "
            f"{crs_name(own)}); leave it out, or correct the file with ogr2ogr -a_srs"
        )
    return wanted


def _own_crs(info: dict[str, Any]) -> CRS | None:
    if not info["crs"]:
        return None
    try:
        own = CRS.from_user_input(info["crs"])
    except CRSError:
        return None
    # GeoPackages say so in words.
    return None if "undefined" in own.to_wkt().lower()[:60] else own


def _inside(bounds: Bounds, limits: Bounds) -> bool:
    across = bounds.left >= limits.left and bounds.right <= limits.right
    return across and bounds.bottom >= limits.bottom and bounds.top <= limits.top


def _no_polygons(path: str, layer: str, kind: str) -> TilenetError:
    return TilenetError(
        f"vector labels must be polygons ({path}, layer {layer}: {kind}); buffer them to their "
        "width on the ground (QGIS: Buffer, PostGIS or ogr2ogr -dialect sqlite: ST_Buffer)"
    )
