"""`report.html`: one page that says how a run went, without network and without scripts."""

from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from tilenet.errors import TilenetError
from tilenet.files.aside import write_aside
from tilenet.parallel.progress import say
from tilenet.report.confusion import classes
from tilenet.report.heading import heading, run_file
from tilenet.report.learning import learning, validation
from tilenet.report.markup import Markup, join, tag
from tilenet.report.memory_used import memory_used
from tilenet.report.places import places
from tilenet.report.run_view import RunView
from tilenet.report.style import STYLE
from tilenet.report.tables import note, section
from tilenet.report.tile_grid import tile_grid
from tilenet.report.time_spent import time_spent
from tilenet.run.folder import REPORT

__all__ = ["page", "try_report", "write_report"]

# What numbers, lists and texts raise in the place of others.
NONSENSE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

# Should anything of a page ever ask for another file, browsers refuse.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_report(
    folder: Path, out: Path | None = None, map_path: str | None = None, *, maps: bool = True
) -> Path:
    """Write a run's report; returns where.

    Args:
        folder: Of the run.
        out: The page; None: `report.html` in the folder.
        map_path: A class map of one of the run's images, to show places of.
        maps: Without one: whether the network may map some places itself.

    Raises:
        TilenetError: It is no folder of a run, the map does not belong to it, or the page cannot be
            written.
    """
    view = RunView(folder)
    # A run.yaml alone may be one that somebody is about to start.
    if not any((view.history, view.validation, view.checkpoint, view.facts)):
        raise TilenetError(
            f"a report is made of the folder of a run ({folder} holds no history.csv, run.json or "
            "checkpoint); name the run file's output"
        )
    target = folder / REPORT if out is None else out
    write_aside(page(view, map_path, maps=maps), target, "a report")
    return target


def try_report(folder: Path, *, maps: bool) -> None:
    """Write the report at the end of a run, which is not lost for it: what fails is said."""
    try:
        write_report(folder, maps=maps)
    except Exception as error:  # whatever it is
        why = " ".join(str(error).split()) or type(error).__name__
        say(f"no report was written ({why}); tilenet report {folder} tries again")


def page(view: RunView, map_path: str | None = None, *, maps: bool = True) -> Markup:
    """The page as text."""
    made = datetime.now(timezone.utc)
    body = tag(
        "main",
        _part("Run", lambda: heading(view, made)),
        _part("Learning", lambda: learning(view)),
        _part("Validation", lambda: validation(view)),
        _part("Classes", lambda: classes(view)),
        _part("Places", lambda: places(view, map_path, compute=maps)),
        _part("Time", lambda: time_spent(view)),
        _part("Memory", lambda: memory_used(view)),
        _part("Tiles", lambda: tile_grid(view)),
        run_file(view),
        tag("footer", "Written by tilenet. Colours are chosen to be told apart by everybody."),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{view.folder.resolve().name}: a tilenet run"),
        tag("style", Markup(STYLE)),
    )
    return join(Markup("<!DOCTYPE html>\n"), tag("html", head, tag("body", body), lang="en"))


def _part(title: str, make: Callable[[], Markup | None]) -> Markup | None:
    """A part of the page; a sentence where files of the run hold what no run writes."""
    try:
        return make()
    except NONSENSE as error:
        said = f"{type(error).__name__}: {error}"
        return section(
            title,
            note(f"This cannot be shown: a file of the run holds what no run writes ({said})."),
        )
