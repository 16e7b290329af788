"""Which classes are found, and what they are taken for, at the best and the last validation."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tilenet.report.learning import best_row
from tilenet.report.parts import Cell, Heading, Note, Part, Section, Table, number
from tilenet.report.run_view import RunView

__all__ = ["classes", "confusion_of"]

MOST_CLASSES = 24  # of a matrix that can be read
MOST_PAIRS = 20  # that are listed where there are more
LARGEST = 4096  # class number; larger ones are none of ours


def classes(view: RunView) -> Section:
    """A table of scores per class and a confusion matrix, of the best and the last validation."""
    if view.numbers:
        return Section("Classes", [])
    parts = [part for step, name in _steps(view) for part in _one(view, step, name)]
    return Section("Classes", parts or [Note("This run has no validation to show classes of.")])


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


def _one(view: RunView, step: float, which: str) -> list[Part]:
    matrix = confusion_of(view, step)
    num = len(view.classes) if matrix is None else len(matrix)
    names = [*view.classes, *(str(n) for n in range(len(view.classes), num))]
    head = Heading(f"{which} validation, step {step:,.0f}")
    scored = _per_class(view, step, names, matrix)
    if matrix is None:
        return [head, scored, Note("confusion.csv has no pixels of this step.")]
    return [head, scored, (_matrix if num <= MOST_CLASSES else _pairs)(names, matrix)]


def _per_class(
    view: RunView, step: float, names: Sequence[str], matrix: NDArray[np.int64] | None
) -> Table:
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
    return Table("Scores per class", heads, rows)


def _bar(value: float | None) -> Cell:
    if value is None or value != value:
        return Cell("–")
    share = min(max(value, 0.0), 1.0) * 100
    filled = f"linear-gradient(90deg,#cfe3f1 {share:.1f}%,transparent {share:.1f}%)"
    return Cell(f"{value:.4f}", background=filled)


def _matrix(names: Sequence[str], matrix: NDArray[np.int64]) -> Table:
    rows: list[tuple[str | Cell, ...]] = []
    for label, name in enumerate(names):
        total = int(matrix[label].sum())
        cells = []
        for predicted, other in enumerate(names):
            count = int(matrix[label, predicted])
            share = count / total if total else 0.0
            shown = f"{share:.1%}" if count else ("–" if not total else "0")
            title = f"{count:,} pixels of {name} taken for {other}"
            cells.append(Cell(shown, title, _colour(share, label == predicted)))
        rows.append((name, *cells, f"{total:,}"))
    heads = ("label ↓ predicted →", *names, "pixels labelled")
    return Table("Confusion matrix: what pixels of a label are taken for", heads, rows)


def _pairs(names: Sequence[str], matrix: NDArray[np.int64]) -> Table:
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
    return Table(f"The most frequent errors, of {len(matrix):,} classes", heads, rows)


def _colour(share: float, right: bool) -> str:
    """White to green on the diagonal, white to red off it; text on it stays readable."""
    strong = (0, 158, 115) if right else (213, 94, 0)
    mixed = [round(255 - (255 - part) * 0.75 * share**0.5) for part in strong]
    return f"rgb({mixed[0]},{mixed[1]},{mixed[2]})"
