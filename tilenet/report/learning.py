"""Curves of a run: loss, learning rate and validation scores over steps, and overfitting."""

import numpy as np
from numpy.typing import NDArray

from tilenet.report.charts import Curve, curves
from tilenet.report.run_view import RunView, Section

SCORES = (
    ("mean_iou", "mean IoU"),
    ("mean_f1", "mean F1"),
    ("accuracy", "accuracy"),
    ("rmse", "RMSE"),
    ("mae", "MAE"),
)


def learning(view: RunView) -> Section:
    """Loss and learning rate."""
    history = view.history
    loss = None if history is None else history.column("loss")
    if history is None or loss is None:
        return {"notes": ["There is no history.csv with a step in it."]}
    steps, alt, least = history.columns["step"], f"Loss over {len(history):,} steps", None
    lines = [Curve("step; dark: mean of those around it", steps, loss, smooth=True)]
    held_out = None if view.validation is None else view.validation.column("loss")
    if view.validation is not None and held_out is not None:
        lines.append(Curve("validation", view.validation.columns["step"], held_out))
    if np.isfinite(loss).any():
        at = int(np.where(np.isfinite(loss), loss, np.inf).argmin())
        least = steps[at], loss[at], f"lowest {loss[at]:.4g}, step {steps[at]:,.0f}"
        alt += f", {least[2]}"
    charts = [curves(lines, alt, "loss", least, log=True)]
    rate = history.column("learning_rate")
    if rate is not None:
        drawn = [Curve("learning rate", steps, rate)]
        charts.append(curves(drawn, f"Learning rate over {len(steps):,} steps", "learning rate"))
    return {"charts": charts}


def validation(view: RunView) -> Section:
    """Return the section with scores on pixels that training did not see."""
    table = view.validation
    lines = []
    if table is not None:
        known = [(name, table.column(key)) for key, name in SCORES]
        steps = table.columns["step"]
        lines = [Curve(name, steps, values) for name, values in known if values is not None]
    if table is None or not lines:
        missing = "This run has no validation.csv: nothing was held out (validation.share)."
        return {"notes": [missing]}
    mark, best = None, ""
    if view.best is not None:
        step, value = view.best
        best = f"The best by {view.score} is {value:.4g}, of step {step:,.0f}."
        if view.score in dict(SCORES):
            mark = step, value, f"best {value:.4g}, step {step:,.0f}"
    alt = f"Validation scores at {len(table):,} steps. {best}"
    return {"charts": [curves(lines, alt, "score", mark)], "notes": [best] * bool(best)}


AROUND = 3  # validations in the medians that are compared, at the lowest and at the end
RISES = 1.05  # least ratio of the end to the lowest
CHANGES = 3  # least rise, in usual changes from one validation to the next


def overfitting(view: RunView) -> str | None:
    """Return a sentence where the validation loss rises while the training loss falls; else None.

    It rises if at least three validations follow the lowest one, and the median of the last three
    lies above the median of the three at the lowest: by 5 % or more, and by more than three times
    the usual difference of one validation since from the next. The training loss falls if the
    median of the last steps lies below that of as many steps up to the lowest validation: half as
    many as were made since.
    """
    history, validation = view.history, view.validation
    if history is None or validation is None:
        return None
    training, held_out = history.column("loss"), validation.column("loss")
    if training is None or held_out is None:
        return None
    known = np.isfinite(held_out)
    at, losses = validation.columns["step"][known], held_out[known]
    if len(losses) <= AROUND:
        return None
    best = int(losses.argmin())
    lowest = _median(losses[max(best - 1, 0) : best + 2])
    end = _median(losses[-AROUND:])
    usual = _median(np.abs(np.diff(losses[best:])))
    if best + AROUND >= len(losses) or not max(RISES * lowest, lowest + CHANGES * usual) < end:
        return None
    steps = history.columns["step"]
    before, since = training[steps <= at[best]], training[steps > at[best]]
    count = min(len(before), max(len(since) // 2, 1))
    then, now = _median(before[-count:]), _median(since[-count:])
    if not (count and now < then):
        return None
    return (
        "The validation loss rises while the training loss falls: it was lowest after step "
        f"{at[best]:,.0f} ({losses[best]:.4g}) and is {end:.4g} at the end, while the loss of "
        f"steps fell from {then:.4g} to {now:.4g}. Since then the network has learned what only "
        f"its training images have; {_advice(view)}."
    )


def _advice(view: RunView) -> str:
    advice = "fewer steps, more images, augment or network.dropout help"
    if view.best is None:
        return advice
    return f"the checkpoint best is that of step {view.best[0]:,.0f}, by {view.score}; {advice}"


def _median(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else float("nan")
