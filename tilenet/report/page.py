"""`report.html`: one page that says how a run went, without network and without scripts.

What was run, when, with what and on what; and the run file itself.

Which classes are found, and what they are taken for: tables of the best and last validation.
"""

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tilenet.errors import TilenetError
from tilenet.parallel.health.progress import say
from tilenet.report.html import STYLE, Markup, cell, join, note, number, section, table, tag
from tilenet.report.learning import best_row, learning, overfitting, validation
from tilenet.report.maps import tile_grid
from tilenet.report.places import places
from tilenet.report.resources import memory_used, time_spent
from tilenet.report.run_view import RunView
from tilenet.storage.atomic import write_aside
from tilenet.training.folder import REPORT

__all__ = ["classes", "confusion_of", "heading", "page", "run_file", "try_report", "write_report"]


def heading(view: RunView, made: datetime) -> Markup:
    """The title, a word on what was learned, and the most important facts."""
    facts = view.facts
    lines: list[tuple[str, object]] = [("folder", str(view.folder))]
    if facts.get("began"):
        lines.append(("began", facts["began"]))
    lines.append(("report made", made.isoformat(timespec="seconds")))
    if view.history is not None:
        seconds = float(view.history.seconds("seconds").sum())
        steps = int(view.history.columns["step"][-1])
        lines.append(("steps made", f"{steps:,} in {_duration(seconds)}"))
        loss = view.history.column("loss")
        if loss is not None:
            lines.append(("last loss", f"{loss[-1]:.5g}"))
    if view.validation is not None and (at := best_row(view.validation, view.score)) is not None:
        columns = view.validation.columns
        value, step = columns[view.score][at], columns["step"][at]
        lines.append((f"best {view.score}", f"{value:.4f}, step {step:,.0f}"))
    if facts.get("parameters"):
        lines.append(("network", f"{facts['layers']} layers, {facts['parameters']:,} parameters"))
    mesh = facts.get("mesh")
    if isinstance(mesh, list) and len(mesh) == 3:
        lines.append(("ranks", f"{mesh[0]} × {mesh[1]} × {mesh[2]} (replicas × rows × columns)"))
    lines += [("machine", text) for text in facts.get("machine", ())[:8]]
    if isinstance(facts.get("versions"), dict):
        shown = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
        lines.append(("versions", shown))
    rows = [join(tag("dt", name), tag("dd", value)) for name, value in lines]
    name = view.folder.resolve().name
    title = tag("h1", name, tag("small", "a training run of tilenet"))
    word = overfitting(view)
    said = None if word is None else tag("p", word, class_="word", role="note")
    return tag("header", title, said, tag("dl", *rows))


def run_file(view: RunView) -> Markup:
    """The run file, with the values of its plan and of the command line."""
    if view.run_text is None:
        return section("Run file", note("The run did not keep its run file (run.yaml)."))
    return section("Run file", tag("pre", view.run_text.strip(), tabindex="0"))


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    if not hours and rest < 100:
        return f"{seconds:.1f} s"
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


MOST_CLASSES = 24  # of a matrix that can be read
MOST_PAIRS = 20  # that are listed where there are more
LARGEST = 4096  # class number; larger ones are none of ours


def classes(view: RunView) -> Markup:
    """A table of scores per class and a confusion matrix, of the best and the last validation."""
    steps = _steps(view)
    if not steps:
        return section("Classes", note("This run has no validation to show classes of."))
    return section("Classes", *(_one(view, step, name) for step, name in steps))


def confusion_of(view: RunView, step: float) -> NDArray[np.int64] | None:
    """Pixels by label (rows) and predicted class; None: confusion.csv has none of that step."""
    found = view.confusion
    if found is None:
        return None
    rows = found.columns["step"] == step
    label, predicted, pixels = (
        np.nan_to_num(found.columns[name][rows], nan=-1).astype(np.int64)
        for name in ("label", "predicted", "pixels")
    )
    fit = (label >= 0) & (predicted >= 0) & (np.maximum(label, predicted) < LARGEST)
    if not fit.any():
        return None
    if view.classes:  # beyond them stand pixels without data in the map
        fit &= predicted < len(view.classes)
    if not fit.any():
        return None
    most = max(int(label[fit].max()), int(predicted[fit].max())) + 1
    most = max(most, len(view.classes))
    matrix = np.zeros((most, most), np.int64)
    np.add.at(matrix, (label[fit], predicted[fit]), pixels[fit])
    return matrix


def _steps(view: RunView) -> list[tuple[float, str]]:
    """Steps to show, with their names: the best and the last one, which may be the same."""
    if view.validation is None:
        found = view.confusion
        return [] if found is None else [(float(found.columns["step"].max()), "Last")]
    last = float(view.validation.columns["step"][-1])
    at = best_row(view.validation, view.score)
    best = last if at is None else float(view.validation.columns["step"][at])
    if at is None:
        return [(last, "Last")]
    return [(last, "Best and last")] if best == last else [(best, "Best"), (last, "Last")]


def _one(view: RunView, step: float, which: str) -> Markup:
    matrix = confusion_of(view, step)
    parts: list[object] = [tag("h3", f"{which} validation, step {step:,.0f}")]
    num = len(view.classes) if matrix is None else len(matrix)
    names = [*view.classes, *(str(n) for n in range(len(view.classes), num))]
    parts.append(_per_class(view, step, names, matrix))
    if matrix is None:
        parts.append(note("confusion.csv has no pixels of this step."))
    elif num <= MOST_CLASSES:
        parts.append(_matrix(names, matrix))
    else:
        parts.append(_pairs(names, matrix))
    return tag("div", *parts, class_="wide")


def _per_class(
    view: RunView, step: float, names: Sequence[str], matrix: NDArray[np.int64] | None
) -> Markup:
    scored = view.validation
    place = None if scored is None else int(np.argmax(scored.columns["step"] == step))

    def score(kind: str, number_of: int) -> float | None:
        if scored is None or place is None:
            return None
        # Columns carry the name of a class, or its number.
        for name in (names[number_of], str(number_of)):
            if (values := scored.columns.get(f"{kind}_{name}")) is not None:
                return float(values[place])
        return None

    rows = []
    for index, name in enumerate(names):
        label = mapped = None
        if matrix is not None:
            label, mapped = float(matrix[index].sum()), float(matrix[:, index].sum())
        iou, f1 = score("iou", index), score("f1", index)
        rows.append((name, _bar(iou), _bar(f1), number(label), number(mapped)))
    heads = ("class", "IoU", "F1", "pixels labelled", "pixels predicted")
    return table("Scores per class", heads, rows)


def _bar(value: float | None) -> Markup:
    if value is None or value != value:
        return cell("–")
    share = min(max(value, 0.0), 1.0) * 100
    filled = f"linear-gradient(90deg,#cfe3f1 {share:.1f}%,transparent {share:.1f}%)"
    return cell(f"{value:.4f}", colour=filled)


def _matrix(names: Sequence[str], matrix: NDArray[np.int64]) -> Markup:
    rows = []
    for label, name in enumerate(names):
        total = int(matrix[label].sum())
        cells: list[Markup] = []
        for predicted, other in enumerate(names):
            count = int(matrix[label, predicted])
            share = count / total if total else 0.0
            shown = f"{share:.1%}" if count else ("–" if not total else "0")
            title = f"{count:,} pixels of {name} taken for {other}"
            cells.append(cell(shown, colour=_colour(share, label == predicted), title=title))
        rows.append((name, *cells, f"{total:,}"))
    heads = ("label ↓ predicted →", *names, "pixels labelled")
    return table("Confusion matrix: what pixels of a label are taken for", heads, rows)


def _pairs(names: Sequence[str], matrix: NDArray[np.int64]) -> Markup:
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(wrong, axis=None)[::-1][:MOST_PAIRS]
    rows = []
    for place in order:
        label, predicted = divmod(int(place), len(matrix))
        count = int(wrong[label, predicted])
        if count:
            share = f"{count / matrix[label].sum():.1%}"
            rows.append((names[label], names[predicted], f"{count:,}", share))
    heads = ("label", "taken for", "pixels", "of the label")
    return table(f"The most frequent errors, of {len(matrix):,} classes", heads, rows)


def _colour(share: float, right: bool) -> str:
    """White to green on the diagonal, white to red off it; text on it stays readable."""
    strong = (0, 158, 115) if right else (213, 94, 0)
    mixed = [round(255 - (255 - part) * 0.75 * share**0.5) for part in strong]
    return f"rgb({mixed[0]},{mixed[1]},{mixed[2]})"


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
