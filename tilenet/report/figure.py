"""Figures of matplotlib, which is loaded when one is drawn, without a window system."""

import base64
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tilenet.errors import TilenetError

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
    """Write next to the target and rename, so that no half picture is ever there."""
    path = Path(path)
    ending = path.suffix.removeprefix(".").lower() or "png"
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        figure.savefig(part, format=ending)
        part.replace(path)
    except (OSError, ValueError) as error:  # ValueError: an ending that matplotlib does not know
        raise TilenetError(
            f"the picture must go where it can be written, as png, pdf or svg ({path}: {error}); "
            "choose another path"
        ) from error
    finally:
        with suppress(OSError):  # the file system may be read-only
            part.unlink(missing_ok=True)
