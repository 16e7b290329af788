"""An image and its labels as coarse as a picture of them needs, however large they are."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilenet.files.bands import BandNames
from tilenet.files.label_files import open_labels
from tilenet.files.raster import Nodata, Pixels, Raster
from tilenet.files.vector_keys import VectorKeys
from tilenet.geometry.bbox import Part
from tilenet.geometry.tiles import Window

__all__ = ["LabelFile", "Thumbnail", "thumbnail"]


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
        factor: Rows and columns of the image that stand for one of the picture.
        window: Of the image, that is seen.
    """

    pixels: Pixels
    labels: NDArray[np.int64] | None
    factor: int
    window: Window


def thumbnail(
    path: str,
    most_px: int,
    bands: BandNames | None = None,
    nodata: Nodata = None,
    resolution: float | None = None,
    window: Window | None = None,
    labels: LabelFile | None = None,
    part: Part | None = None,
) -> Thumbnail:
    """Read a picture of at most `most_px` rows and columns.

    Every so many-th pixel is read, from overviews where the file has some; polygons are burned on
    this coarse grid. Nothing of the image's size is ever held.

    Args:
        path: Of the image.
        most_px: Largest side.
        bands: To read.
        nodata: As in run files.
        resolution: Pixel size that `window` counts; None: the file's.
        window: Within the image; None: all of it.
        labels: Wanted too.
        part: Of the image, instead of `window`; None: all of it.

    Raises:
        TilenetError: A file cannot be read, or does not fit.
    """
    with Raster(path, bands, resolution, nodata) as image:
        seen = window or (part or Part()).of(tuple(image.transform), image.size, path)
        factor = max(1, -(-max(seen.height, seen.width) // most_px))
        transform = image.transform
        own = float(np.hypot(transform.a, transform.d))
    with Raster(path, bands, own * factor, nodata) as coarse:
        row, col = seen.row // factor, seen.col // factor
        place = Window(
            row,
            col,
            min(max(1, seen.height // factor), coarse.height - row),
            min(max(1, seen.width // factor), coarse.width - col),
        )
        pixels = coarse.sample(place)
        found = None
        if labels is not None:
            opened = open_labels(labels.path, coarse, labels.ignore_index, labels.vectors)
            with opened:
                found = opened.sample(place)
    return Thumbnail(pixels, found, factor, seen)
