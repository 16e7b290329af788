"""`report.html`: one page that says how a run went; it needs no network and no scripts.

templates/page.html is its layout, and escapes all values.
"""

from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from tilenet.errors import TilenetError
from tilenet.parallel.health.progress import say
from tilenet.report.classes import classes
from tilenet.report.learning import learning, overfitting, validation
from tilenet.report.places import places
from tilenet.report.resources import resources
from tilenet.report.run_view import RunView, Section
from tilenet.storage.atomic import write_aside
from tilenet.training.folder.files import REPORT

BEGIN = b"<!DOCTYPE html>"

# Errors of code that finds a number, a list or a text in a file where it expects another type.
UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def write_report(
    folder: Path, out: Path | None = None, map_path: str | None = None, *, maps: bool = True
) -> Path:
    """Write a run's report; return its path.

    Args:
        out: Path of the page; None: `report.html` in the folder.
        map_path: A class map of one of the run's images, to show parts of.
        maps: Without `map_path`: whether the network may map some places for the report.

    Raises:
        TilenetError: The folder is not one of a run, the map does not belong to it, or the page
            cannot be written.
    """
    view = RunView(folder)
    # A folder with run.yaml alone may be that of a run that is about to start.
    if not any((view.history, view.validation, view.checkpoint, view.facts)):
        raise TilenetError(
            f"a report needs the folder of a run ({folder} holds no history.csv, run.json or "
            "checkpoint); name the folder that is output in the run file"
        )
    target = folder / REPORT if out is None else out
    if out is not None and out.is_file() and not _is_page(out):
        raise TilenetError(
            f"a report replaces no other file ({out} is there and is no page); give it another name"
        )
    write_aside(page(view, map_path, maps=maps), target, "a report")
    return target


def _is_page(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(BEGIN)) == BEGIN
    except OSError:  # which writing says
        return True


def try_report(folder: Path, *, maps: bool) -> None:
    """Write the report at the end of a run; print an error instead of raising it."""
    try:
        write_report(folder, maps=maps)
    except Exception as error:  # a run must not fail for its report
        why = " ".join(str(error).split()) or type(error).__name__
        say(f"no report was written ({why}); tilenet report {folder} tries again")


def page(view: RunView, map_path: str | None = None, *, maps: bool = True) -> str:
    """The page as text."""
    from jinja2 import Environment, PackageLoader

    makers: dict[str, Callable[[], Section]] = {
        "Run": lambda: {"facts": _facts(view), "warning": overfitting(view)},
        "Learning": lambda: learning(view),
        "Validation": lambda: validation(view),
        "Classes": lambda: classes(view),
        "Places": lambda: places(view, map_path, compute=maps),
        "Time and memory": lambda: resources(view),
        "Run file": lambda: _run_file(view),
    }
    sections = {title: _section(make) for title, make in makers.items()}
    environment = Environment(loader=PackageLoader("tilenet.report"), autoescape=True)
    template = environment.get_template("page.html")
    text = template.render(name=view.folder.resolve().name, sections=sections)
    return text.encode("utf-8", "backslashreplace").decode()  # file names may not be UTF-8


def _section(make: Callable[[], Section]) -> Section:
    """A section of the page; a note in its place where a file of the run is malformed."""
    try:
        return make()
    except UNREADABLE as error:
        why = f"{type(error).__name__}: {error}"
        return {
            "notes": [f"This cannot be shown: a file of the run holds what no run writes ({why})."]
        }


def _facts(view: RunView) -> list[tuple[str, object]]:
    """The most important facts of the run."""
    facts = view.facts
    lines: list[tuple[str, object]] = [("folder", str(view.folder))]
    if facts.get("began"):
        lines.append(("began", facts["began"]))
    lines.append(("report made", datetime.now(timezone.utc).isoformat(timespec="seconds")))
    if view.history is not None:
        seconds = float(view.history.seconds("seconds").sum())
        steps = int(view.history.columns["step"][-1])
        lines.append(("steps made", f"{steps:,} in {_duration(seconds)}"))
        loss = view.history.column("loss")
        if loss is not None:
            lines.append(("last loss", f"{loss[-1]:.5g}"))
    if view.best is not None:
        step, value = view.best
        lines.append((f"best {view.score}", f"{value:.4f}, step {step:,.0f}"))
    if facts.get("parameters"):
        lines.append(("network", f"{facts['layers']} layers, {facts['parameters']:,} parameters"))
    mesh = facts.get("mesh")
    if isinstance(mesh, list) and len(mesh) == 3:
        lines.append(("ranks", f"{mesh[0]} × {mesh[1]} × {mesh[2]} (replicas × rows × columns)"))
    lines += [("machine", text) for text in facts.get("machine", ())[:8]]
    if isinstance(facts.get("versions"), dict):
        versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
        lines.append(("versions", versions))
    return lines


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    if not hours and rest < 100:
        return f"{seconds:.1f} s"
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


def _run_file(view: RunView) -> Section:
    """The run file, with the values of its plan and of the command line."""
    if view.run_text is None:
        return {"notes": ["The run did not keep its run file (run.yaml)."]}
    return {"text": view.run_text.strip()}
