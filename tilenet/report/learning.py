"""Sections on what the network learned: loss, learning rate and validation scores over steps."""

import numpy as np

from tilenet.files.run_tables import RunTable
from tilenet.report.curves import Curve, Mark, curves
from tilenet.report.markup import Markup, tag
from tilenet.report.run_view import RunView
from tilenet.report.tables import note, section

__all__ = ["best_row", "learning", "validation"]

SCORES = (("mean_iou", "mean IoU"), ("mean_f1", "mean F1"), ("accuracy", "accuracy"))


def best_row(table: RunTable, score: str) -> int | None:
    """The row of the best validation: of the smallest loss, or of the largest other score."""
    values = table.column(score)
    if values is None:
        return None
    return int(np.nanargmin(values) if score == "loss" else np.nanargmax(values))


def learning(view: RunView) -> Markup:
    """Loss and learning rate."""
    history = view.history
    loss = None if history is None else history.column("loss")
    if history is None or loss is None:
        return section("Learning", note("There is no history.csv with a step in it."))
    steps = history.columns["step"]
    lines = [Curve("loss of a step; dark: mean of those around it", steps, loss, smooth=True)]
    held_out = None if view.validation is None else view.validation.column("loss")
    if view.validation is not None and held_out is not None:
        lines.append(Curve("validation", view.validation.columns["step"], held_out))
    parts: list[object] = []
    if np.isfinite(loss).any():
        finite = np.where(np.isfinite(loss), loss, np.inf)
        at = int(finite.argmin())
        least = Mark(steps[at], loss[at], f"lowest {loss[at]:.4g}, step {steps[at]:,.0f}")
        parts.append(curves(lines, f"Loss over {len(steps):,} steps", "loss", least))
    rate = history.column("learning_rate")
    if rate is None:
        parts.append(note("This run did not record its learning rate."))
    else:
        alt = f"Learning rate over {len(steps):,} steps"
        drawn = [Curve("learning rate", steps, rate)]
        parts.append(curves(drawn, alt, "learning rate", from_zero=True, log=False))
    return section("Learning", tag("div", *parts, class_="pair"))


def validation(view: RunView) -> Markup:
    """Scores on what training did not see."""
    table = view.validation
    lines = []
    if table is not None:
        found = [(name, table.column(key)) for key, name in SCORES]
        steps = table.columns["step"]
        lines = [Curve(name, steps, values) for name, values in found if values is not None]
    if table is None or not lines:
        return section(
            "Validation",
            note("This run has no validation.csv: nothing was held out (validation.share)."),
        )
    score = view.score
    at = best_row(table, score)
    mark = None
    told = ""
    if at is not None:
        step, value = table.columns["step"][at], table.columns[score][at]
        told = f"The best by {score} is {value:.4g}, of step {step:,.0f}."
        if score != "loss":
            mark = Mark(step, value, f"best {value:.4g}, step {step:,.0f}")
    alt = f"Validation scores at {len(table):,} steps. {told}"
    drawn = curves(lines, alt, "score", mark, log=False)
    return section("Validation", tag("div", drawn, class_="pair"), note(told) if told else None)
