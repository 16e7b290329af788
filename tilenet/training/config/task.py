"""Check the run file's keys against its task."""

from typing import Any

from tilenet.choices import VALUE_LOSSES
from tilenet.errors import TilenetError
from tilenet.scores import VALUE_SCORES
from tilenet.storage.class_names import check_class_names


def check_task(run: Any) -> None:
    """Refuse keys of the other task.

    Args:
        run: A `RunFile`, of a module that imports this one.

    Raises:
        TilenetError: The error names the first of them.
    """
    if (run.loss_terms[0] in VALUE_LOSSES) != (run.task == "regression"):
        raise TilenetError(
            f"l1, l2 and huber are losses of a regression, the others of classes (loss: "
            f"{run.loss}, task: {run.task}); choose one of the task's"
        )
    if run.score != "loss" and (run.score in VALUE_SCORES) != (run.task == "regression"):
        raise TilenetError(
            f"rmse, mae and r2 are scores of a regression, the others of classes "
            f"(validation.score: {run.score}, task: {run.task}); choose one of the task's"
        )
    if run.task == "regression":
        _check_regression(run)


def _check_regression(run: Any) -> None:
    if len(run.class_names) != 1:
        raise TilenetError(
            f"a regression predicts one number per pixel (classes: {run.classes}); name one, as in "
            "classes: [height]"
        )
    check_class_names([run.unit or ""], "unit")
