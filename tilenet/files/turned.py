"""Read what a tile of a turned image shows: pixels and labels."""

import numpy as np
from numpy.typing import NDArray

from tilenet.files.label_source import LabelSource
from tilenet.files.raster import Pixels, Raster
from tilenet.geometry.symmetry import Symmetry
from tilenet.geometry.tiles import Tile, Window

__all__ = ["read_turned"]


def read_turned(
    image: Raster, labels: LabelSource, tile: Tile, region: Window, symmetry: Symmetry
) -> tuple[Pixels, NDArray[np.int64]]:
    """Pixels of what a tile reads, and labels of what it owns, (H, W).

    Args:
        tile: Of the turned region.
        region: Pixels of the image that count as the image.
        symmetry: How they are turned.

    Raises:
        TilenetError: A file cannot be read there.
    """
    size = region.height, region.width
    pixels = image.read(symmetry.source(tile.read, *size), region)
    own = labels.read(symmetry.source(tile.own, *size), region)
    turned = Pixels(symmetry.turn(pixels.values), symmetry.turn(pixels.valid))
    # torch takes no views that run backwards.
    return turned, np.ascontiguousarray(symmetry.turn(own))
