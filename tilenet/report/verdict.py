"""A word on what a run learned: whether it fits its training images at the cost of others."""

import numpy as np
from numpy.typing import NDArray

from tilenet.report.learning import best_row
from tilenet.report.run_view import RunView

__all__ = ["overfitting"]

AROUND = 3  # validations whose median is compared, at the lowest and at the end
RISES = 1.05  # at least by so much, and by so many of the usual changes
CHANGES = 3


def overfitting(view: RunView) -> str | None:
    """What to say where the validation loss rises while the training loss falls; else None.

    It rises if at least three validations follow the lowest one, and the median of the last three
    lies above the median of the three at the lowest: by 5 % or more, and by more than three times
    what one validation since usually differs from the next. The training loss falls if the median
    of the last steps lies below that of as many steps up to the lowest validation: half as many as
    were made since.
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
    if view.validation is None or (row := best_row(view.validation, view.score)) is None:
        return advice
    step = view.validation.columns["step"][row]
    return f"the checkpoint best is that of step {step:,.0f}, by {view.score}; {advice}"


def _median(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else float("nan")
