"""Log of a run: tables and scalars of its steps and validations, printed lines and callbacks."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import isnan, nan
from pathlib import Path

from tilenet.errors import TilenetError
from tilenet.parallel.health.progress import say
from tilenet.scores import VALUE_SCORES, better
from tilenet.storage.checkpoints import checkpoint_of_step
from tilenet.storage.tables import COLUMNS, History
from tilenet.storage.tensorboard import Scalars
from tilenet.training.folder.files import TABLES
from tilenet.training.scoring import Validated
from tilenet.training.step import StepResult

SCORES = ("accuracy", "mean_iou", "mean_f1")
MAX_PRINTED_CLASSES = 10

# Takes a row of a table by column names; None: no value.
RowCallback = Callable[[Mapping[str, float | None]], object]


def _ignore_row(row: Mapping[str, float | None]) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Callbacks:
    """Functions called with each new row of a table, on the rank that writes the tables.

    Attributes:
        on_step: Called after each step, with its row of `history.csv`.
        on_validation: Called after each validation, with its row of `validation.csv`.
    """

    on_step: RowCallback = _ignore_row
    on_validation: RowCallback = _ignore_row


NO_CALLBACKS = Callbacks()


class RunLog:
    """Tables and scalars of a run, on the rank that writes them.

    Args:
        folder: Folder of the run.
        names: Names of the classes.
        score: Name of the score of the best validation; None: there are no validations.
        steps_done: Number of steps made. Rows of later steps are dropped, as are incomplete last
            rows, which is printed, and pixels of validations without scores.
        tensorboard: Whether scalars are written for TensorBoard, too.
        callbacks: Called with each row.
        task: Task of the run.

    Raises:
        TilenetError: A table is damaged, lacks rows, or cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        score: str | None,
        steps_done: int,
        *,
        tensorboard: bool = False,
        callbacks: Callbacks = NO_CALLBACKS,
        task: str = "classification",
    ) -> None:
        self.callbacks = callbacks
        self.raised: Exception | None = None  # by a callback
        self._scores = VALUE_SCORES if task == "regression" else SCORES
        self.folder, self.names, self._score = folder, names, score
        history, validation, confusion = (folder / name for name in TABLES)
        self.history = History(history, steps_done, whole=True)
        self._tables = tables = [self.history]
        self.validations: History | None = None
        if score is not None:
            of_classes = [f"{score}_{name}" for name in self.names for score in ("iou", "f1")]
            of_classes *= task == "classification"
            if steps_done and not validation.exists() and os.path.lexists(folder / "best"):
                raise TilenetError(
                    f"{validation.name} says which validation was the best ({validation}: missing, "
                    f"{folder / 'best'}: there); put it back, or delete best"
                )
            self.columns = ("step", "loss", "num_pixels", *self._scores, "seconds", *of_classes)
            self.validations = History(validation, steps_done, self.columns)
            # Scores are written last: a run that was killed between both tables makes both again.
            steps_with_scores = {int(row["step"]) for row in self.validations.rows()}
            columns = ("step", "label", "predicted", "pixels")
            self.confusion = History(confusion, steps_done, columns, steps_with_scores)
            tables += self.validations, self.confusion
        for table in tables:
            if table.torn:
                say(
                    f"the last row of {table.path} was cut off, by a kill or a full disk, and is "
                    "left out"
                )
        self.scalars = Scalars(folder, steps_done, say) if tensorboard else None

    def step(self, step: int, result: StepResult) -> None:
        """Add a row for a step, counted from 1."""
        row = (
            result.loss,
            result.weight,
            result.seconds,
            result.read_seconds,
            result.reduce_seconds,
            *astuple(result.swaps),
            result.rate,
            result.exchange_seconds,
            result.peak_bytes,
        )
        self.history.add(step, *row)
        self._call(self.callbacks.on_step, dict(zip(COLUMNS, (step, *row), strict=True)))
        if self.scalars:
            self.scalars.add(step, {"loss": result.loss, "learning_rate": result.rate})

    def _call(self, callback: RowCallback, row: Mapping[str, float | None]) -> None:
        """Call it, unless one has raised; its error ends the run on all ranks, not here alone."""
        if self.raised is None:
            try:
                callback(row)
            except Exception as error:  # a program's own
                self.raised = error

    def validation(self, step: int, result: Validated, *, best: bool) -> None:
        """Add rows for a validation, and print its scores."""
        assert self.validations is not None
        values = {name: result.score(name) for name in ("loss", *self._scores)}
        scalars = {name: None if isnan(value) else value for name, value in values.items()}
        loss, *means = scalars.values()
        iou, f1 = result.scores.get("iou", ()), result.scores.get("f1", ())
        classes = [value for pair in zip(iou, f1, strict=True) for value in pair]
        cells = [
            (step, label, guess, pixels)
            for label, row in enumerate(result.scores.get("confusion", ()))
            for guess, pixels in enumerate(row)
            if pixels
        ]
        if cells:
            self.confusion.add_rows(cells)
        # Last, since a row here means that the validation is complete.
        figures = (loss, result.scores["num_pixels"], *means, result.seconds, *classes)
        self.validations.add(step, *figures)
        named = dict(zip(self.columns, (step, *figures), strict=True))
        self._call(self.callbacks.on_validation, named)
        say(
            f"validation after step {step}: {self._text(result)}; {result.seconds:.1f} s"
            + "; the best so far" * best
        )
        if self.scalars:
            scalars |= {f"iou/{name}": value for name, value in zip(self.names, iou, strict=False)}
            scalars |= {f"f1/{name}": value for name, value in zip(self.names, f1, strict=False)}
            self.scalars.add(step, {f"validation/{name}": value for name, value in scalars.items()})

    def _text(self, result: Validated) -> str:
        """The scores of a validation, for people."""
        scores, names = result.scores, self.names
        if "iou" not in scores:
            values = ((name, result.score(name)) for name in ("loss", *self._scores))
            return ", ".join(f"{name} {'–' if isnan(x) else f'{x:.4g}'}" for name, x in values)
        text = (
            f"mean IoU {scores['mean_iou']:.4f}, accuracy {scores['accuracy']:.4f}, loss "
            f"{result.loss:.4f}"
        )
        if len(names) > MAX_PRINTED_CLASSES:
            return text
        each = zip(names, scores["iou"], strict=True)
        texts = (f"{name} {'–' if iou is None else f'{iou:.4f}'}" for name, iou in each)
        return f"{text}; IoU {', '.join(texts)}"

    def has_validation(self, step: int) -> bool:
        """Whether the tables hold a validation after `step` steps."""
        rows = [] if self.validations is None else self.validations.rows()
        return any(row["step"] == str(step) for row in rows)

    def best(self) -> tuple[int, float] | None:
        """Return step and value of the best validation with a checkpoint that is still there.

        A better one without a checkpoint is printed.
        """
        if self.validations is None or self._score is None:
            return None
        name, best, lost = self._score, None, None
        for row in self.validations.rows():
            step, text = int(row["step"]), row[name]
            value = float(text) if text else nan
            if checkpoint_of_step(self.folder, step) is not None:
                best = _better_of(name, best, (step, value))
            else:
                lost = _better_of(name, lost, (step, value))
        if lost is not None and _better_of(name, best, lost) == lost:
            left = "none has one"
            if best is not None:
                left = f"the best with one: {best[1]:.4f} after step {best[0]}, to which best links"
            say(
                f"the best validation has no checkpoint any more ({name}: {lost[1]:.4f} after step "
                f"{lost[0]}; {left}); keep validation.score as the run began, or start over with "
                "--overwrite"
            )
        return best

    def sync(self) -> None:
        """Write the tables through to the disk, before a checkpoint that refers to them.

        Raises:
            TilenetError: A table cannot be written.
        """
        for table in self._tables:
            table.sync()

    def close(self) -> None:
        """Close the files."""
        for table in self._tables:
            table.close()
        if self.scalars is not None:
            self.scalars.close()


def _better_of(
    score: str, old: tuple[int, float] | None, new: tuple[int, float]
) -> tuple[int, float] | None:
    """The better of two validations, by step and value; of equals the old one, nan is none."""
    if isnan(new[1]) or (old is not None and not better(score, new[1], old[1])):
        return old
    return new
