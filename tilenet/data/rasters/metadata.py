"""What a raster's file says besides its pixels and its grid: palettes, control points, arrays."""

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rasterio.enums import ColorInterp
from rasterio.errors import CRSError

from tilenet.data.rasters.extent import crs_name
from tilenet.data.rasters.raster import GDAL_ERRORS

__all__ = [
    "Palette",
    "Places",
    "array_of",
    "class_names",
    "colour_table",
    "others_of",
    "palette_of",
    "places_of",
]

PLAIN = {(0, 0, 0, 255), (0, 0, 0, 0)}  # GDAL fills palettes up with black
MOST_NAMES = 4096  # of classes
ZARR_HEADERS = (".zarray", "zarr.json")


@dataclass(frozen=True)
class Palette:
    """Colours that the numbers of a band stand for.

    Attributes:
        entries: Numbers that have a colour, black included.
        colours: Colours that are not black, as #rrggbb.
    """

    entries: int
    colours: dict[int, str]


@dataclass(frozen=True)
class Places:
    """Where pixels lie, by other means than a transform.

    Attributes:
        gcps: Number of ground control points.
        gcps_crs: Name of the CRS of these; None: there is none.
        rpcs: Whether the file has rational polynomial coefficients.
        geolocation: Whether it names arrays of coordinates, one per pixel.
    """

    gcps: int
    gcps_crs: str | None
    rpcs: bool
    geolocation: bool


def palette_of(dataset: Any, band: int) -> Palette | None:
    """The palette of one of a dataset's bands."""
    entries = _entries(dataset, band)
    if entries is None:
        return None
    colours = {
        int(number): f"#{colour[0]:02x}{colour[1]:02x}{colour[2]:02x}"
        for number, colour in entries.items()
        if tuple(colour) not in PLAIN
    }
    return Palette(len(entries), colours)


def colour_table(dataset: Any, band: int) -> NDArray[np.uint8] | None:
    """Red, green and blue of each number of a band (N, 3); None: these are no colour numbers."""
    entries = _entries(dataset, band)
    if not entries:
        return None
    table = np.zeros((max(entries) + 1, 3), np.uint8)
    for number, colour in entries.items():
        table[number] = colour[:3]
    return table


def _entries(dataset: Any, band: int) -> dict[int, tuple[int, ...]] | None:
    if dataset.colorinterp[band - 1] != ColorInterp.palette:
        return None
    try:
        return dict(dataset.colormap(band))
    except (*GDAL_ERRORS, ValueError):
        return None


def places_of(dataset: Any) -> Places:
    """Control points and RPCs of a dataset."""
    try:
        points, crs = dataset.gcps
    except (*GDAL_ERRORS, CRSError, ValueError):
        points, crs = [], None
    return Places(
        len(points),
        crs_name(crs) if crs else None,
        bool(dataset.tags(ns="RPC")),
        bool(dataset.tags(ns="GEOLOCATION")),
    )


def array_of(dataset: Any) -> str | None:
    """Name of the array that is read of a file that holds arrays."""
    if dataset.driver == "Zarr":
        found = (PurePath(path) for path in dataset.files)
        return next((path.parent.name for path in found if path.name in ZARR_HEADERS), None)
    return dataset.tags(1).get("NETCDF_VARNAME") if dataset.driver == "netCDF" else None


def others_of(dataset: Any) -> tuple[str, ...]:
    """Names of the rasters of a dataset's file that are not read with it."""
    name = str(dataset.name)
    read = {name, f"GTIFF_DIR:1:{name}"}  # of the pages of a TIFF the first
    return tuple(other for other in map(str, dataset.subdatasets) if other not in read)


def class_names(dataset: Any) -> dict[int, str]:
    """Names by class, from the tags `class_0`, `class_1` … of a dataset's first band.

    That is how the maps of `tilenet predict` hold them.
    """
    found = {}
    for tag, name in dataset.tags(1).items():
        number = str(tag).removeprefix("class_")
        if number != tag and number.isdecimal() and int(number) < MOST_NAMES:
            found[int(number)] = str(name)
    return dict(sorted(found.items()))
