"""An image and its labels, of any size, as coarse as a picture of them needs."""

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilenet.data.labels.open import open_labels
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.data.rasters.bands import BandNames
from tilenet.data.rasters.raster import Nodata, Pixels, Raster
from tilenet.data.rasters.resample import MOST_FACTOR
from tilenet.geometry.windows import Window


@dataclass(frozen=True)
class LabelFile:
    """Labels of an image.

    Attributes:
        vectors: Rules for burning polygons; None: as class 1.
    """

    path: str
    ignore_index: int
    vectors: VectorKeys | None = None


@dataclass(frozen=True)
class Thumbnail:
    """A picture's pixels.

    Attributes:
        pixels: Values (C, H, W), and where there is data.
        labels: Classes (H, W); None: the image has no labels.
    """

    pixels: Pixels
    labels: NDArray[np.int64] | None


def thumbnail(
    path: str,
    labels: LabelFile | None,
    most_px: int,
    bands: BandNames | None,
    nodata: Nodata,
    window: Window,
) -> Thumbnail:
    """Read a picture with `most_px` pixels along its larger side, or all pixels if it has fewer.

    Evenly spaced pixels are read, from overviews where the file has some, and polygons are burned
    on the coarse grid. Nothing of the image's size is ever held.

    Raises:
        TilenetError: A file cannot be read, or does not fit.
    """
    every = min(MOST_FACTOR, max(1, max(window.height, window.width) // most_px))
    with ExitStack() as opened:
        with Raster(path) as image:
            own = float(np.hypot(image.transform.a, image.transform.d))
        coarse = opened.enter_context(Raster(path, bands, own * every, nodata))
        row, col = window.row // every, window.col // every
        height = min(max(1, window.height // every), coarse.height - row)
        width = min(max(1, window.width // every), coarse.width - col)
        place = Window(row, col, height, width)
        pixels, burned = coarse.sample(place), None
        if labels is not None:
            source = opened.enter_context(
                open_labels(labels.path, coarse, labels.ignore_index, labels.vectors)
            )
            burned = source.sample(place)
    scale = min(1.0, most_px / max(height, width))
    rows, cols = (_middles(side, max(1, round(side * scale))) for side in (height, width))
    values, valid = pixels.values[:, rows[:, None], cols], pixels.valid[rows[:, None], cols]
    return Thumbnail(Pixels(values, valid), None if burned is None else burned[rows[:, None], cols])


def _middles(length: int, count: int) -> NDArray[np.int64]:
    """Return the numbers of the pixels, of `length`, that the middles of `count` intervals hit."""
    return np.asarray((2 * np.arange(count) + 1) * length // (2 * count), np.int64)
