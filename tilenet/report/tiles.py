"""The tiles of a run on a picture of its first image."""

from typing import TYPE_CHECKING, Any

from tilenet.data.thumbnail import Thumbnail, thumbnail
from tilenet.errors import TilenetError
from tilenet.report.charts import figure_of, svg
from tilenet.report.parts import Legend, Note, Section
from tilenet.report.pictures import rgba, stretched
from tilenet.report.run_view import RunView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["grid_figure", "tiles"]

MOST_GRID_PX = 900
MOST_LINES = 400  # along an axis; of more tiles only some borders are drawn
OWN, READ = "#ffffff", "#ffb000"


def tiles(view: RunView) -> Section:
    """Own windows, and the read window of one tile with its halo."""
    title, run, facts = "Tiles", view.run, view.facts.get("tiles")
    if run is None or not isinstance(facts, dict):
        return Section(
            title, [Note("There are no run.yaml and run.json that name image and tiles.")]
        )
    path = view.path_of(run.image_paths[0])
    bands = None if run.bands is None else run.bands[: 3 if len(run.bands) >= 3 else 1]
    try:
        keys = bands, run.nodata, run.resolution
        seen = thumbnail(path, MOST_GRID_PX, *keys, part=run.part)
    except TilenetError as error:
        return Section(title, [Note(f"The first image cannot be shown: {error}")])
    try:
        words = _words(path, seen, facts)
        alt = f"First image with {_grid(facts)}: own windows, and one read window"
        keys_shown = Legend([(OWN, "own windows"), (READ, "what one tile reads")])
        return Section(title, [svg(grid_figure(seen, facts), alt), keys_shown, Note(words)])
    except (KeyError, TypeError, ValueError, IndexError):
        return Section(title, [Note("run.json does not say where tiles lie.")])


def grid_figure(seen: Thumbnail, facts: dict[str, Any]) -> "Figure":
    """The borders of own windows on the image, in its pixels.

    Args:
        seen: The image.
        facts: See `tiling_facts`.
    """
    from matplotlib.patches import Rectangle

    height, width = seen.window.height, seen.window.width
    rows, cols = facts["rows"], facts["columns"]
    tall, wide = (int(side) for side in facts["size"])
    # A crop lies wherever it is drawn: here in the middle.
    top, left = ((height - tall) // 2, (width - wide) // 2) if _is_crop(seen, facts) else (0, 0)
    figure = figure_of(8.0, min(16.0, max(1.0, 8.0 * height / width)), None)
    axes = figure.add_axes((0, 0, 1, 1))
    picture = rgba(stretched(seen.pixels), seen.pixels.valid).transpose(1, 2, 0)
    axes.imshow(picture, extent=(0, width, height, 0), interpolation="none")
    for colour, thick in (("#000000", 1.8), (OWN, 1.0)):
        across = [top + first for first in _borders(rows, tall)]
        axes.hlines(across, left, left + wide, colors=colour, linewidths=thick)
        down = [left + first for first in _borders(cols, wide)]
        axes.vlines(down, top, top + tall, colors=colour, linewidths=thick)
    row, col = rows[len(rows) // 2], cols[len(cols) // 2]
    corner = left + col[0], top + row[0]
    axes.add_patch(Rectangle(corner, col[1], row[1], fill=False, ec=READ, lw=2, ls="--"))
    beyond = max(0, row[0] + row[1] - tall, col[0] + col[1] - wide, -row[0], -col[0])
    axes.set(xlim=(-beyond, width + beyond), ylim=(height + beyond, -beyond))
    axes.axis("off")
    return figure


def _is_crop(seen: Thumbnail, facts: dict[str, Any]) -> bool:
    tall, wide = (int(side) for side in facts["size"])
    return (tall, wide) != (seen.window.height, seen.window.width)


def _grid(facts: dict[str, Any]) -> str:
    return f"{len(facts['rows'])} × {len(facts['columns'])} tiles"


def _words(path: str, seen: Thumbnail, facts: dict[str, Any]) -> str:
    height, width = seen.window.height, seen.window.width
    rows, cols = facts["rows"], facts["columns"]
    shown = ""
    if seen.size != (height, width):
        shown = ", shown as {:,} × {:,}".format(*seen.size)
    what = "a crop of the image (crop_px)" if _is_crop(seen, facts) else "the image"
    halo = (
        "halos are exchanged between ranks"
        if facts["exchanged"]
        else f"halo {facts['halo_px']} px, work ratio {facts['work_ratio']:.2f}"
    )
    tall, wide = (int(side) for side in facts["size"])
    return (
        f"{path}: {height:,} × {width:,} px{shown}. {_grid(facts)} of {what}, {tall:,} × {wide:,} "
        f"px; a tile owns up to {max(span[3] for span in rows):,} × "
        f"{max(span[3] for span in cols):,} px and reads {rows[len(rows) // 2][1]:,} × "
        f"{cols[len(cols) // 2][1]:,} px; {halo}."
    )


def _borders(spans: list[list[int]], pixels: int) -> list[int]:
    """Where tiles begin, and the end."""
    every = -(-len(spans) // MOST_LINES)
    return [int(span[2]) for span in spans[::every]] + [pixels]
