"""What a raster's file says besides its pixels and its grid: palettes, arrays, names."""

from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rasterio.enums import ColorInterp

from tilenet.data.rasters.raster import GDAL_ERRORS

__all__ = ["array_of", "class_names", "colour_table", "others_of"]

MOST_NAMES = 4096  # of classes
ZARR_HEADERS = (".zarray", "zarr.json")


def colour_table(dataset: Any, band: int) -> NDArray[np.uint8] | None:
    """Red, green and blue of each number of a band (N, 3); None: these are no colour numbers."""
    if dataset.colorinterp[band - 1] != ColorInterp.palette:
        return None
    try:
        entries = dataset.colormap(band)
    except (*GDAL_ERRORS, ValueError):
        return None
    if not entries:
        return None
    table = np.zeros((max(entries) + 1, 3), np.uint8)
    for number, colour in entries.items():
        table[number] = colour[:3]
    return table


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
