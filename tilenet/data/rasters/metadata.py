"""What a raster's file says besides its pixels and its grid: palettes and names of classes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from rasterio.enums import ColorInterp

from tilenet.data.rasters.raster import GDAL_ERRORS

__all__ = ["class_names", "colour_table"]

MOST_NAMES = 4096  # of classes


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
