"""The tiles of a run on a picture of its first image."""

from typing import Any

from tilenet.errors import TilenetError
from tilenet.files.png import data_uri
from tilenet.files.thumbnail import Thumbnail, thumbnail
from tilenet.report.curves import legend
from tilenet.report.markup import Markup, tag
from tilenet.report.pictures import rgba, stretched
from tilenet.report.run_view import RunView
from tilenet.report.tables import note, section

__all__ = ["tile_grid"]

MOST_PX = 900
MOST_LINES = 400  # along an axis; of more tiles only every so many-th border is drawn
OWN, READ = "#ffffff", "#ffb000"


def tile_grid(view: RunView) -> Markup:
    """Own windows, and the read window of one tile with its halo."""
    title, run, facts = "Tiles", view.run, view.facts.get("tiles")
    if run is None or not isinstance(facts, dict):
        return section(title, note("There are no run.yaml and run.json that name image and tiles."))
    path = view.path_of(run.image_paths[0])
    bands = None if run.bands is None else run.bands[: 3 if len(run.bands) >= 3 else 1]
    try:
        keys = bands, run.nodata, run.resolution
        seen = thumbnail(path, MOST_PX, *keys, part=run.part)
    except TilenetError as error:
        return section(title, note(f"The first image cannot be shown: {error}"))
    try:
        return section(title, *_drawn(path, seen, facts))
    except (KeyError, TypeError, ValueError, IndexError):
        return section(title, note("run.json does not say where tiles lie."))


def _drawn(path: str, seen: Thumbnail, facts: dict[str, Any]) -> list[Markup]:
    height, width = seen.window.height, seen.window.width
    rows, cols = facts["rows"], facts["columns"]
    tall, wide = (int(side) for side in facts["size"])
    crop = (tall, wide) != (height, width)
    # A crop lies wherever it is drawn: here in the middle.
    top, left = ((height - tall) // 2, (width - wide) // 2) if crop else (0, 0)
    stroke = max(height, width) / 500
    lines = []
    for first in _borders(rows, tall):
        y = top + first
        lines.append(tag("line", x1=left, x2=left + wide, y1=y, y2=y))
    for first in _borders(cols, wide):
        x = left + first
        lines.append(tag("line", y1=top, y2=top + tall, x1=x, x2=x))
    row, col = rows[len(rows) // 2], cols[len(cols) // 2]
    read = tag(
        "rect",
        x=left + col[0],
        y=top + row[0],
        width=col[1],
        height=row[1],
        fill="none",
        stroke=READ,
        stroke_width=stroke * 1.6,
        stroke_dasharray=f"{stroke * 5:.1f} {stroke * 3:.1f}",
    )
    picture = tag(
        "image",
        href=data_uri(rgba(stretched(seen.pixels), seen.pixels.valid)),
        width=width,
        height=height,
        preserveAspectRatio="none",
    )
    what = "a crop of the image (crop_px)" if crop else "the image"
    grid = f"{len(rows)} × {len(cols)} tiles"
    halo = (
        "halos are exchanged between ranks"
        if facts["exchanged"]
        else f"halo {facts['halo_px']} px, work ratio {facts['work_ratio']:.2f}"
    )
    alt = f"First image with {grid} of {what}: own windows, and one read window"
    beyond = max(0, row[0] + row[1] - tall, col[0] + col[1] - wide, -row[0], -col[0])
    svg = tag(
        "svg",
        tag("title", alt),
        picture,
        tag("g", *lines, stroke="#000000", stroke_width=stroke * 1.8, stroke_opacity=0.5),
        tag("g", *lines, stroke=OWN, stroke_width=stroke),
        read,
        viewBox=f"{-beyond} {-beyond} {width + 2 * beyond} {height + 2 * beyond}",
        role="img",
        aria_label=alt,
        class_="tiles",
    )
    words = f"{path}: {height:,} × {width:,} px"
    if seen.size != (height, width):
        words += ", shown as {:,} × {:,}".format(*seen.size)
    about = (
        f"{words}. {grid} of {what}, {tall:,} × {wide:,} px; a tile owns up to "
        f"{max(span[3] for span in rows):,} × {max(span[3] for span in cols):,} px and reads "
        f"{row[1]:,} × {col[1]:,} px; {halo}."
    )
    keys = legend([(OWN, "own windows"), (READ, "what one tile reads")])
    return [tag("figure", svg, keys, class_="broad"), note(about)]


def _borders(spans: list[list[int]], pixels: int) -> list[int]:
    """Where tiles begin, and the end."""
    every = -(-len(spans) // MOST_LINES)
    return [int(span[2]) for span in spans[::every]] + [pixels]
