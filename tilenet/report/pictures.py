"""Pictures of images, labels and errors as arrays of pixels, with a legend of their classes."""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilenet.data.rasters.raster import Pixels
from tilenet.errors import one_line
from tilenet.mapping.writer import class_colours

__all__ = [
    "Shown",
    "class_picture",
    "coloured",
    "drawn",
    "error_picture",
    "lines",
    "outline",
    "overlaid",
    "rgba",
    "stretched",
    "with_legend",
]

EDGE_VALUE = 0.7  # of a colour, at an outline
EDGE_OPACITY = 2.0  # of what is inside
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


def coloured(numbers: NDArray[np.generic], colours: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Numbers of colours (H, W) in these colours (N, 3); black where there is none for them."""
    known = (numbers >= 0) & (numbers < len(colours))  # type: ignore[operator]
    picture = colours[np.where(known, numbers, 0).astype(np.int64)] * known[..., None]
    return np.asarray(picture.transpose(2, 0, 1), np.uint8)


def rgba(picture: NDArray[np.uint8], valid: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """With a band that is transparent where there is no data, (4, H, W)."""
    return np.concatenate([picture, np.where(valid, 255, 0).astype(np.uint8)[None]])


def class_picture(labels: NDArray[np.int64], num_classes: int) -> NDArray[np.uint8]:
    """Classes in their colours (3, H, W); light grey where there is none."""
    known = (labels >= 0) & (labels < num_classes)
    colours = _colours(num_classes)
    picture = colours[np.where(known, labels, 0)].transpose(2, 0, 1)
    return np.where(known, picture, 245).astype(np.uint8)


def overlaid(
    picture: NDArray[np.uint8],
    labels: NDArray[np.int64],
    painted: NDArray[np.bool_],
    opacity: float,
) -> NDArray[np.uint8]:
    """A picture (3, H, W) under half transparent labels, whose outlines are darker and denser.

    Args:
        picture: The image.
        labels: (H, W).
        painted: (H, W); where they are painted. Labels there are 0 or more.
        opacity: 0: the picture as it is; 1: labels hide it.
    """
    if not painted.any():
        return picture
    shown = np.where(painted, labels, -1)
    edges = outline(shown)
    colours = class_picture(shown, int(shown.max()) + 1) * np.where(edges, EDGE_VALUE, 1.0)
    share = np.where(edges, min(1.0, EDGE_OPACITY * opacity), opacity) * painted
    mixed: NDArray[np.uint8] = np.round(picture * (1 - share) + colours * share).astype(np.uint8)
    return mixed


def outline(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Pixels left of, right of, above or below one of another label, on both sides."""
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
    values = band.astype(np.float64) / 2  # or differences of the largest numbers overflow
    if not valid.any():
        return np.zeros(band.shape, np.uint8)
    bottom, top = np.percentile(values[valid], [low, high])
    if not top > bottom:  # of few values: as they lie between the smallest and the largest
        bottom, top = values[valid].min(), values[valid].max()
    scaled = (np.where(valid, values, bottom) - bottom) / ((top - bottom) or 1.0)
    grey: NDArray[np.uint8] = np.round(np.clip(scaled, 0, 1) * 255).astype(np.uint8)
    return grey


MOST_CLASSES = 40
MOST_LETTERS = 40
ROW_PX = 20
PATCH_PX = 12
MARGIN_PX = 8
LETTER_PX = 8  # of the monospaced font
POINTS = 9.0
DPI = 100


@dataclass(frozen=True)
class Shown:
    """A class of a picture.

    Attributes:
        label: Its number.
        name: Its name, or nothing.
        colour: Red, green and blue; None: it is not painted.
        share: Share of the labelled pixels of the picture.
    """

    label: int
    name: str
    colour: tuple[int, int, int] | None
    share: float

    @property
    def text(self) -> str:
        """Number and name, as they may stand on a terminal."""
        name = one_line(self.name)
        cut = name if len(name) <= MOST_LETTERS else name[: MOST_LETTERS - 1] + "…"
        return f"{self.label} {cut}".strip()


def lines(classes: Sequence[Shown]) -> list[str]:
    """A line for each class, the first ones of very many."""
    shown = classes[:MOST_CLASSES]
    widest = max((len(one.text) for one in shown), default=0)
    found = []
    for one in shown:
        colour = "#{:02x}{:02x}{:02x}".format(*one.colour) if one.colour else "not painted"
        found.append(f"  {one.text:<{widest}}  {colour:<11}  {one.share:7.2%}")
    if len(classes) > len(shown):
        found.append(f"  and {len(classes) - len(shown):,} more classes")
    return found


def drawn(classes: Sequence[Shown], least_px: int) -> NDArray[np.uint8] | None:
    """A white strip with the painted classes (4, H, W); None: there are none.

    Args:
        classes: Those of the picture.
        least_px: Width of the strip, unless a name needs more.
    """
    painted = [one for one in classes if one.colour is not None]
    if not painted:
        return None
    # On its first start on a machine it says that it looks for fonts.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    texts = [one.text for one in painted[:MOST_CLASSES]]
    texts += [f"and {len(painted) - len(texts)} more"] * (len(painted) > len(texts))
    column = 3 * MARGIN_PX + PATCH_PX + LETTER_PX * max(map(len, texts))
    columns = max(1, min(len(texts), (least_px - MARGIN_PX) // column))
    width = max(least_px, column)
    height = -(-len(texts) // columns) * ROW_PX + MARGIN_PX
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    for place, text in enumerate(texts):
        row, col = divmod(place, columns)
        x, middle = MARGIN_PX + col * column, height - MARGIN_PX / 2 - (row + 0.5) * ROW_PX
        colour = painted[place].colour if place < MOST_CLASSES else None
        if colour is not None:
            corner = x / width, (middle - PATCH_PX / 2) / height
            sides = PATCH_PX / width, PATCH_PX / height
            figure.add_artist(
                Rectangle(corner, *sides, facecolor=[part / 255 for part in colour], linewidth=0)
            )
        figure.text(
            (x + PATCH_PX + MARGIN_PX) / width,
            middle / height,
            text,
            family="monospace",
            fontsize=POINTS,
            va="center",
            parse_math=False,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font lacks are boxes
        canvas.draw()  # type: ignore[no-untyped-call]
    letters = np.asarray(canvas.buffer_rgba(), np.uint8)  # type: ignore[no-untyped-call]
    return np.ascontiguousarray(letters.transpose(2, 0, 1))


def with_legend(picture: NDArray[np.uint8], strip: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    """A picture (4, H, W) above a strip; transparent where it is narrower."""
    if strip is None:
        return picture
    beyond = strip.shape[2] - picture.shape[2]
    return np.concatenate([np.pad(picture, ((0, 0), (0, 0), (0, beyond))), strip], axis=1)
