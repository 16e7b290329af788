"""Pictures of images, labels and errors: colours of pixels, no files."""

import numpy as np
from numpy.typing import NDArray

from tilenet.files.maps import class_colours
from tilenet.files.raster import Pixels

__all__ = ["class_picture", "error_picture", "outline", "overlaid", "rgba", "stretched"]

OPACITY = 0.5
RIGHT, WRONG = (222, 228, 224), (213, 60, 0)


def stretched(pixels: Pixels, low: float = 2.0, high: float = 98.0) -> NDArray[np.uint8]:
    """Red, green and blue (3, H, W): each band from one percentile of its valid pixels to another.

    Of one or two bands the first is grey; of more the first three are taken.

    Args:
        pixels: Their values in any dtype.
        low: Percentile that becomes black.
        high: Percentile that becomes white.
    """
    bands = pixels.values[:3] if len(pixels.values) >= 3 else pixels.values[:1]
    planes = [_stretch(band, pixels.valid, low, high) for band in bands]
    return np.stack(planes * (3 // len(planes)))


def rgba(picture: NDArray[np.uint8], valid: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """With a band that is transparent where there is no data, (4, H, W)."""
    return np.concatenate([picture, np.where(valid, 255, 0).astype(np.uint8)[None]])


def class_picture(
    labels: NDArray[np.int64], num_classes: int, background: int = 245
) -> NDArray[np.uint8]:
    """Classes in their colours (3, H, W); light grey where there is none."""
    known = (labels >= 0) & (labels < num_classes)
    colours = _colours(num_classes)
    picture = colours[np.where(known, labels, 0)].transpose(2, 0, 1)
    return np.where(known, picture, background).astype(np.uint8)


def overlaid(
    picture: NDArray[np.uint8], labels: NDArray[np.int64], ignore: int
) -> NDArray[np.uint8]:
    """A picture (3, H, W) under half transparent labels, whose outlines are opaque.

    Args:
        picture: The image.
        labels: (H, W); negative ones and `ignore` are left out.
        ignore: Label of pixels that do not count.
    """
    known = (labels >= 0) & (labels != ignore)
    if not known.any():
        return picture
    colours = class_picture(labels, int(labels[known].max()) + 1).astype(np.float64)
    mixed = picture * (1 - OPACITY) + colours * OPACITY
    edges = outline(labels) & known
    mixed = np.where(edges, colours * 0.7, mixed)
    shown: NDArray[np.uint8] = np.where(known, np.round(mixed), picture).astype(np.uint8)
    return shown


def outline(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Pixels beside, above or below one of another label, on both sides."""
    edges = np.zeros(labels.shape, np.bool_)
    rows = labels[1:] != labels[:-1]
    cols = labels[:, 1:] != labels[:, :-1]
    edges[1:] |= rows
    edges[:-1] |= rows
    edges[:, 1:] |= cols
    edges[:, :-1] |= cols
    return edges


def error_picture(
    labels: NDArray[np.int64], found: NDArray[np.int64], ignore: int
) -> NDArray[np.uint8]:
    """Where a map differs from labels (3, H, W); white where nothing is labelled."""
    counts = (labels != ignore) & (found >= 0)
    picture = np.full((3, *labels.shape), 255, np.uint8)
    for colour, where in ((RIGHT, labels == found), (WRONG, labels != found)):
        picture[:, counts & where] = np.array(colour, np.uint8)[:, None]
    return picture


def _colours(num_classes: int) -> NDArray[np.uint8]:
    return np.array([colour[:3] for colour in class_colours(num_classes)], np.uint8)


def _stretch(
    band: NDArray[np.generic], valid: NDArray[np.bool_], low: float, high: float
) -> NDArray[np.uint8]:
    values = band.astype(np.float64) / 2  # differences of the largest numbers overflow
    if not valid.any():
        return np.zeros(band.shape, np.uint8)
    bottom, top = np.percentile(values[valid], [low, high])
    if not top > bottom:  # of few values: as they lie between the smallest and the largest
        bottom, top = values[valid].min(), values[valid].max()
    scaled = (np.where(valid, values, bottom) - bottom) / ((top - bottom) or 1.0)
    grey: NDArray[np.uint8] = np.round(np.clip(scaled, 0, 1) * 255).astype(np.uint8)
    return grey
