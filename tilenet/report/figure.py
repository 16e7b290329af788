"""Figures of matplotlib, which is loaded when one is drawn, without a window system."""

import base64
from pathlib import Path
from typing import TYPE_CHECKING

from tilenet.errors import TilenetError
from tilenet.storage.atomic import aside

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure_of(width: float, height: float, dpi: int = 150) -> "Figure":
    """An empty figure, in inches, that no window system has to show."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def data_uri(png: bytes) -> str:
    """Address that holds the whole picture."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a picture in the format of its ending, or as png without one."""
    ending = path.suffix.removeprefix(".").lower() or "png"
    try:
        with aside(path) as part:
            figure.savefig(part, format=ending)
    except (OSError, ValueError) as error:  # ValueError: an ending that matplotlib does not know
        raise TilenetError(
            f"the picture must go where it can be written, as png, pdf or svg ({path}: {error}); "
            "choose another path"
        ) from error
