"""Pictures of images, labels and errors as arrays of pixels, with a legend of their classes."""

import io
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tilenet.data.rasters.raster import Pixels
from tilenet.mapping.writing.class_colours import class_colours
from tilenet.report.figure import data_uri, figure_of, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI, POINTS, LETTER_PX = 128, 7.0, 8  # a power of two, so that pixels are whole
RIGHT, WRONG = (222, 228, 224), (213, 60, 0)


def stretched(pixels: Pixels, low: float = 2.0, high: float = 98.0) -> NDArray[np.uint8]:
    """Red, green and blue (3, H, W): each band from one percentile of its valid pixels to another.

    Of one or two bands the first is grey; of more the first three are taken.

    Args:
        pixels: Values of the bands, in any dtype.
        low: Percentile that becomes black.
        high: Percentile that becomes white.
    """
    bands = pixels.values[:3] if len(pixels.values) >= 3 else pixels.values[:1]
    planes = [_stretch(band, pixels.valid, low, high) for band in bands]
    return np.stack(planes * (3 // len(planes)))


def rgba(picture: NDArray[np.uint8], valid: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """A picture with a band (4, H, W) that is transparent where there is no data."""
    return np.concatenate([picture, np.where(valid, 255, 0).astype(np.uint8)[None]])


def class_picture(labels: NDArray[np.int64], num_classes: int) -> NDArray[np.uint8]:
    """Classes in their colours (3, H, W); light grey without a class."""
    known = (labels >= 0) & (labels < num_classes)
    colours = np.array([colour[:3] for colour in class_colours(num_classes)], np.uint8)
    picture = colours[np.where(known, labels, 0)].transpose(2, 0, 1)
    return np.where(known, picture, 245).astype(np.uint8)


def overlaid(
    picture: NDArray[np.uint8],
    labels: NDArray[np.int64],
    painted: NDArray[np.bool_],
    opacity: float,
) -> NDArray[np.uint8]:
    """A picture (3, H, W) under half transparent labels.

    Args:
        labels: (H, W).
        painted: (H, W); where they are painted. Labels there are 0 or more.
        opacity: 0: labels are invisible; 1: labels hide the picture.
    """
    visible = np.where(painted, labels, -1)
    colours, share = class_picture(visible, max(0, int(visible.max())) + 1), opacity * painted
    mixed: NDArray[np.uint8] = np.round(picture * (1 - share) + colours * share).astype(np.uint8)
    return mixed


def error_picture(
    labels: NDArray[np.int64], predicted: NDArray[np.int64], ignore: int
) -> NDArray[np.uint8]:
    """Draw the differences of a map from labels, (3, H, W); white where nothing is labelled."""
    counts = (labels != ignore) & (predicted >= 0)
    picture = np.full((3, *labels.shape), 255, np.uint8)
    for colour, where in ((RIGHT, labels == predicted), (WRONG, labels != predicted)):
        picture[:, counts & where] = np.array(colour, np.uint8)[:, None]
    return picture


def _stretch(
    band: NDArray[np.generic], valid: NDArray[np.bool_], low: float, high: float
) -> NDArray[np.uint8]:
    values = band.astype(np.float64) / 2  # or differences of the largest numbers overflow
    if not valid.any():
        return np.zeros(band.shape, np.uint8)
    bottom, top = np.percentile(values[valid], [low, high])
    if not top > bottom:  # of few values: as they lie between the smallest and the largest
        bottom, top = values[valid].min(), values[valid].max()
    scaled = (np.where(valid, values, bottom) - bottom) / ((top - bottom) or 1.0)
    grey: NDArray[np.uint8] = np.round(np.clip(scaled, 0, 1) * 255).astype(np.uint8)
    return grey


def picture_uri(picture: NDArray[np.uint8]) -> str:
    """A picture (3 or 4, H, W) as an address that holds all of it."""
    from matplotlib.image import imsave

    out = io.BytesIO()
    fast = {"compress_level": 1}  # half the seconds for a tenth more bytes
    imsave(out, picture.transpose(1, 2, 0), format="png", pil_kwargs=fast)
    return data_uri(out.getvalue())


def write_picture(
    picture: NDArray[np.uint8], legend: Sequence[tuple[str, str]], path: Path
) -> None:
    """Write a picture (4, H, W) as PNG, pixel by pixel, with names and colours below it.

    Raises:
        TilenetError: It cannot be written.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font lacks are boxes
        save_figure(_with_legend(picture, legend), path)


def _with_legend(picture: NDArray[np.uint8], legend: Sequence[tuple[str, str]]) -> "Figure":
    from matplotlib.patches import Patch

    _, height, width = picture.shape
    figure, strip = figure_of(width / DPI, height / DPI, DPI), 0
    if legend:
        columns = width // (LETTER_PX * (8 + max(len(name) for name, _ in legend)))
        drawn = figure.legend(
            handles=[Patch(color=colour, label=name) for name, colour in legend],
            loc="lower left",
            ncols=min(max(1, columns), len(legend)),
            fontsize=POINTS,
            borderaxespad=0,
            framealpha=1,
        )
        for text in drawn.get_texts():
            text.set_parse_math(False)
        size = drawn.get_window_extent()
        strip = math.ceil(size.height)
        figure.set_size_inches(max(width, math.ceil(size.width)) / DPI, (height + strip) / DPI)
    figure.set_facecolor("none")
    figure.figimage(picture.transpose(1, 2, 0), 0, strip)
    return figure
