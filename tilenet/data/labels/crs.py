"""The CRS of a layer's polygons: that of the file, or the user's where the file has none."""

from typing import Any

from rasterio.crs import CRS
from rasterio.errors import CRSError

from tilenet.data.rasters.bounds import Bounds, crs_name
from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.remedies import SET_CRS
from tilenet.errors import TilenetError


def crs_of_layer(
    path: str, info: dict[str, Any], user_crs: str | None, bounds: Bounds, image: Raster
) -> CRS | None:
    """The CRS of a layer; None: neither it nor the image has one.

    Args:
        info: pyogrio's description of the layer.
        user_crs: The user's CRS: EPSG:…, WKT, `image`; None: not given.

    Raises:
        TilenetError: Neither the file nor the user names one, the image has none, or they
            contradict each other.
    """
    own = _own_crs(info)
    if image.georeferencing.missing:
        raise TilenetError(
            f"an image with vector labels needs a CRS and a transform ({image.path}: "
            f"{image.georeferencing.missing}); {image.georeferencing.remedy}"
        )
    degrees = Bounds(-180.0, -90.0, 180.0, 90.0).wider(0.01)
    # GeoJSON without one is in degrees (RFC 7946); many files are not.
    assumed = info["driver"] == "GeoJSON" and own == CRS.from_epsg(4326)
    if assumed and bounds.finite and not _inside(bounds, degrees):
        if user_crs is None:
            raise TilenetError(
                f"GeoJSON without a CRS is in degrees (RFC 7946; {path}: {bounds}); name the CRS "
                "that it is in with vectors.crs or --label-crs (EPSG:…, or image: the image's)"
            )
        own = None
    if user_crs is None:
        if own is None and image.crs is not None:
            raise TilenetError(
                f"vector labels need a CRS ({path}, layer {info['layer_name']}: none); name it "
                "with vectors.crs or --label-crs (EPSG:…, or image: the image's)"
            )
        if own is not None and image.crs is None:
            raise TilenetError(
                f"an image with vector labels needs a CRS ({image.path}: none, {path}: "
                f"{crs_name(own)}); give it one with {SET_CRS}"
            )
        return own
    try:
        if "://" in user_crs:
            raise CRSError("a CRS is not fetched from the network")
        crs = image.crs if user_crs == "image" else CRS.from_user_input(user_crs)
    except CRSError as error:
        raise TilenetError(
            f"vectors.crs must be a CRS (vectors.crs: {user_crs}); write EPSG:…, WKT, or image"
        ) from error
    if own is not None and own != crs:
        raise TilenetError(
            f"vectors.crs may not contradict the file's CRS (vectors.crs: {user_crs}, {path}: "
            f"{crs_name(own)}); leave it out, or correct the file with ogr2ogr -a_srs or QGIS"
        )
    return crs


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
