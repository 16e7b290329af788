"""Scores and confusions of the classes at the best and the last validation."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tilenet.report.run_view import RunView, Section

MOST_CLASSES = 24  # of a matrix that is still readable
MOST_PAIRS = 20  # listed where there are more
LARGEST = 4096  # class number; larger ones are not ours


def classes(view: RunView) -> Section:
    """A table of scores per class and a confusion matrix, of the best and the last validation."""
    if view.numbers:
        return {}
    tables = [table for step, name in _steps(view) for table in _tables(view, step, name)]
    notes = [] if tables else ["This run has no validation to show classes of."]
    return {"tables": tables, "notes": notes}


def confusion_of(view: RunView, step: float) -> NDArray[np.int64] | None:
    """Pixels by label (rows) and predicted class; None: confusion.csv has no such step."""
    table = view.confusion
    if table is None:
        return None
    rows = table.columns["step"] == step
    label, predicted, pixels = (
        np.nan_to_num(table.columns[name][rows], nan=-1).astype(np.int64)
        for name in ("label", "predicted", "pixels")
    )
    fit = (label >= 0) & (predicted >= 0) & (np.maximum(label, predicted) < LARGEST)
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
        confusion = view.confusion
        return [] if confusion is None else [(float(confusion.columns["step"].max()), "Last")]
    last = float(view.validation.columns["step"][-1])
    if view.best is None:
        return [(last, "Last")]
    best, _ = view.best
    return [(last, "Best and last")] if best == last else [(best, "Best"), (last, "Last")]


def _tables(view: RunView, step: float, which: str) -> list[Section]:
    matrix = confusion_of(view, step)
    num = len(view.classes) if matrix is None else len(matrix)
    names = [*view.classes, *(str(n) for n in range(len(view.classes), num))]
    head = f"{which} validation, step {step:,.0f}"
    tables = [_per_class(view, step, names, matrix)]
    if matrix is not None:
        tables.append((_matrix if num <= MOST_CLASSES else _pairs)(names, matrix))
    return [table | {"caption": f"{head}: {table['caption']}"} for table in tables]


def _per_class(
    view: RunView, step: float, names: Sequence[str], matrix: NDArray[np.int64] | None
) -> Section:
    scored = view.validation
    place = None if scored is None else int(np.argmax(scored.columns["step"] == step))

    def score(kind: str, index: int) -> str:
        # Columns carry the name of a class, or its number.
        for name in (names[index], str(index)):
            if scored is not None and (values := scored.columns.get(f"{kind}_{name}")) is not None:
                return f"{values[place]:.4f}" if np.isfinite(values[place]) else "–"
        return "–"

    rows = []
    for index, name in enumerate(names):
        counts = ["–", "–"]
        if matrix is not None:
            counts = [f"{matrix[index].sum():,}", f"{matrix[:, index].sum():,}"]
        rows.append([name, score("iou", index), score("f1", index), *counts])
    heads = ["class", "IoU", "F1", "pixels labelled", "pixels predicted"]
    return {"caption": "scores per class", "heads": heads, "rows": rows}


def _matrix(names: Sequence[str], matrix: NDArray[np.int64]) -> Section:
    rows = []
    for label, name in enumerate(names):
        total = int(matrix[label].sum())
        cells: list[object] = []
        for predicted, other in enumerate(names):
            count = int(matrix[label, predicted])
            share = count / total if total else 0.0
            cells.append(
                {
                    "text": f"{share:.1%}" if count else ("–" if not total else "0"),
                    "title": f"{count:,} pixels of {name} taken for {other}",
                    "colour": _colour(share, label == predicted),
                }
            )
        rows.append([name, *cells, f"{total:,}"])
    heads = ["label ↓ predicted →", *names, "pixels labelled"]
    caption = "confusion matrix, what pixels of a label are taken for"
    return {"caption": caption, "heads": heads, "rows": rows}


def _pairs(names: Sequence[str], matrix: NDArray[np.int64]) -> Section:
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    rows = []
    for place in np.argsort(wrong, axis=None)[::-1][:MOST_PAIRS]:
        label, predicted = divmod(int(place), len(matrix))
        if count := int(wrong[label, predicted]):
            share = f"{count / matrix[label].sum():.1%}"
            rows.append([names[label], names[predicted], f"{count:,}", share])
    heads = ["label", "taken for", "pixels", "of the label"]
    caption = f"the most frequent errors, of {len(matrix):,} classes"
    return {"caption": caption, "heads": heads, "rows": rows}


def _colour(share: float, right: bool) -> str:
    """White to green on the diagonal, white to red off it; text on it stays readable."""
    strong = (0, 158, 115) if right else (213, 94, 0)
    mixed = [round(255 - (255 - part) * 0.75 * share**0.5) for part in strong]
    return f"rgb({mixed[0]},{mixed[1]},{mixed[2]})"
