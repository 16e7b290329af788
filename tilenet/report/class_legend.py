"""Which colour is which class: as lines of text, and drawn to stand below a picture.

matplotlib, which need not be installed, draws the letters.
"""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilenet.errors import one_line

__all__ = ["Shown", "drawn", "lines", "with_legend"]

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
        share: Of the labelled pixels of the picture.
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
    """A white strip with the painted classes (4, H, W); None: there are none, or no matplotlib.

    Args:
        classes: Those of the picture.
        least_px: Width of the strip, unless a name needs more.
    """
    painted = [one for one in classes if one.colour is not None]
    if not painted:
        return None
    # On its first start on a machine it says that it looks for fonts.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError:
        return None
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
