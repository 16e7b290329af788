"""An image and its labels as coarse as a picture of them needs, however large they are."""

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilenet.data.labels.open import open_labels
from tilenet.data.labels.source import LabelSource
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.data.rasters.raster import Nodata, Pixels, Raster
from tilenet.data.rasters.resample import cells_below, mean_below, middles
from tilenet.data.rasters.stack import BandNames
from tilenet.geometry.windows import Part, Window

__all__ = ["LabelFile", "Thumbnail", "thumbnail"]

STRIP_BYTES = 64 << 20  # of the pixels that are averaged at once


@dataclass(frozen=True)
class LabelFile:
    """Labels that are wanted with an image.

    Attributes:
        path: Their file.
        ignore_index: Label of pixels that do not count.
        vectors: How polygons are burned.
    """

    path: str
    ignore_index: int
    vectors: VectorKeys | None = None


@dataclass(frozen=True)
class Thumbnail:
    """A picture's pixels.

    Attributes:
        pixels: (C, H, W) and where there is data.
        labels: (H, W); None: none were wanted.
        window: Window of the image, that is seen.
    """

    pixels: Pixels
    labels: NDArray[np.int64] | None
    window: Window

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the picture."""
        return self.pixels.valid.shape[0], self.pixels.valid.shape[1]


def thumbnail(
    path: str,
    most_px: int,
    bands: BandNames | None = None,
    nodata: Nodata = None,
    resolution: float | None = None,
    window: Window | None = None,
    labels: LabelFile | None = None,
    part: Part | None = None,
    *,
    means: bool = True,
) -> Thumbnail:
    """Read a picture whose larger side has `most_px` pixels, or all pixels of what is smaller.

    Every n-th pixel is read, from overviews where the file has some, as long as these are
    more than are wanted; each pixel of the picture is the mean of those that lie below it, and its
    label is that below its middle. Polygons are burned on the coarse grid. Nothing of the image's
    size is ever held.

    Args:
        path: Path of the image.
        most_px: Largest side.
        bands: Bands to read.
        nodata: As in run files.
        resolution: Pixel size that `window` counts; None: the file's.
        window: Within the image; None: all of it.
        labels: Wanted too.
        part: Part of the image, instead of `window`; None: all of it.
        means: Whether values can be averaged; else those below the middle of each pixel are taken.

    Raises:
        TilenetError: A file cannot be read, or does not fit.
    """
    with Raster(path, bands, resolution, nodata) as image:
        seen = window or image.window_of(part or Part())
        every = max(1, max(seen.height, seen.width) // most_px)
        transform = image.transform
        own = float(np.hypot(transform.a, transform.d))
    with ExitStack() as opened:
        coarse = opened.enter_context(Raster(path, bands, own * every, nodata))
        row, col = seen.row // every, seen.col // every
        place = Window(
            row,
            col,
            min(max(1, seen.height // every), coarse.height - row),
            min(max(1, seen.width // every), coarse.width - col),
        )
        found = None
        if labels is not None:
            keys = labels.ignore_index, labels.vectors
            found = opened.enter_context(open_labels(labels.path, coarse, *keys))
        if max(place.height, place.width) <= most_px:
            return Thumbnail(
                coarse.sample(place), None if found is None else found.sample(place), seen
            )
        return Thumbnail(*_shrunk(coarse, found, place, most_px, means=means), seen)


def _shrunk(
    coarse: Raster, labels: LabelSource | None, place: Window, most_px: int, *, means: bool
) -> tuple[Pixels, NDArray[np.int64] | None]:
    """A picture of somewhat more pixels than are wanted, strip by strip."""
    scale = most_px / max(place.height, place.width)
    height, width = (max(1, round(side * scale)) for side in (place.height, place.width))
    rows, cols = middles(place.height, height), middles(place.width, width)
    (below, shares), across = cells_below(place.height, height), cells_below(place.width, width)
    num_bands = len(coarse.bands)
    strip = max(1, STRIP_BYTES // (place.width * num_bands * 8))
    parts, found = [], []
    for first in range(0, height, strip):
        part = slice(first, first + strip)
        top = int(below[part].min())
        high = Window(place.row + top, place.col, int(below[part].max()) - top + 1, place.width)
        pixels = coarse.sample(high)
        if means:
            inside = below[part] - top, shares[part]
            parts.append(Pixels(*mean_below(pixels.values, pixels.valid, inside, across)))
        else:
            high_rows = rows[part, None] - top
            values = pixels.values[:, high_rows, cols]
            parts.append(Pixels(values, pixels.valid[high_rows, cols]))
        if labels is not None:
            found.append(labels.sample(high)[rows[part, None] - top, cols])
    values = np.concatenate([part.values for part in parts], axis=1)
    picture = Pixels(values, np.concatenate([part.valid for part in parts]))
    return picture, np.concatenate(found) if labels is not None else None
