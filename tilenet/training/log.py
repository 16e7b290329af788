"""Tables and scalars of a run: its steps and validations, what is said of the latter, who hears."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import isnan
from pathlib import Path

from tilenet.parallel.health.progress import say
from tilenet.scores import VALUE_SCORES, better
from tilenet.storage.checkpoints import checkpoint_of_step
from tilenet.storage.tables import COLUMNS, History
from tilenet.storage.tensorboard import Scalars
from tilenet.training.folder import TABLES
from tilenet.training.scoring import Validated, ValidatedNumbers
from tilenet.training.step import StepResult

__all__ = ["NOBODY", "Callbacks", "Hears", "RunLog"]

SCORES = ("accuracy", "mean_iou", "mean_f1")
MOST_SAID = 10  # classes

# A row of a table by the names of its columns; None: not counted.
Hears = Callable[[Mapping[str, float | None]], object]


def _nothing(row: Mapping[str, float | None]) -> None:
    """For nobody listens."""


@dataclass(frozen=True)
class Callbacks:
    """Called on the rank that writes the tables, each with a row of one of them.

    Attributes:
        on_step: After each step, with its row of `history.csv`.
        on_validation: After each validation, with its row of `validation.csv`.
    """

    on_step: Hears = _nothing
    on_validation: Hears = _nothing


NOBODY = Callbacks()


class RunLog:
    """Tables and scalars of a run, on the rank that writes them.

    Args:
        folder: The run's.
        names: Names of the classes.
        score: Name of the score of the best validation; None: there are no validations.
        tensorboard: Whether scalars are written for TensorBoard, too.
        callbacks: Are called with each row.
        task: Of the run.
        steps_done: What the tables hold of later steps is dropped, as are last rows that were cut
            off, which is said, and pixels of validations whose scores are not there.

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
        callbacks: Callbacks = NOBODY,
        task: str = "classification",
    ) -> None:
        self.callbacks = callbacks
        self._scores = VALUE_SCORES if task == "regression" else SCORES
        self.folder, self.names, self._score = folder, names, score
        history, validation, confusion = (folder / name for name in TABLES)
        self.history = History(history, steps_done, whole=True)
        self._tables = tables = [self.history]
        self.validations: History | None = None
        if score is not None:
            of_classes = [f"{score}_{name}" for name in self.names for score in ("iou", "f1")]
            of_classes *= task == "classification"
            self.columns = ("step", "loss", "num_pixels", *self._scores, "seconds", *of_classes)
            self.validations = History(validation, steps_done, self.columns)
            # Scores are written last: a run that was killed between them makes both again.
            made = {int(row["step"]) for row in self.validations.rows()}
            columns = ("step", "label", "predicted", "pixels")
            self.confusion = History(confusion, steps_done, columns, made)
            tables += self.validations, self.confusion
        for table in tables:
            if table.torn:
                say(
                    f"the last row of {table.path} was cut off, by a kill or a full disk, and is "
                    "left out"
                )
        self.scalars = Scalars(folder, steps_done, say) if tensorboard else None

    def step(self, step: int, done: StepResult) -> None:
        """Note a step, counted from 1."""
        row = (
            done.loss,
            done.weight,
            done.seconds,
            done.read_seconds,
            done.reduce_seconds,
            *astuple(done.swaps),
            done.rate,
            done.exchange_seconds,
            done.peak_bytes,
        )
        self.history.add(step, *row)
        self.callbacks.on_step(dict(zip(COLUMNS, (step, *row), strict=True)))
        if self.scalars:
            self.scalars.add(step, {"loss": done.loss, "learning_rate": done.rate})

    def validation(self, step: int, found: Validated | ValidatedNumbers, *, best: bool) -> None:
        """Note a validation, and say what it found."""
        assert self.validations is not None
        if isinstance(found, ValidatedNumbers):
            self._numbers(step, found, self.validations, best=best)
            return
        all_scores = found.scores
        iou, f1 = all_scores["iou"], all_scores["f1"]
        means = [all_scores[name] for name in SCORES]
        classes = [value for both in zip(iou, f1, strict=True) for value in both]
        cells = [
            (step, label, guess, pixels)
            for label, row in enumerate(all_scores["confusion"])
            for guess, pixels in enumerate(row)
            if pixels
        ]
        self.confusion.add_rows(cells)
        # Last, for a row here says that the validation was made.
        loss = None if isnan(found.loss) else found.loss
        row = (loss, all_scores["num_pixels"], *means, found.seconds, *classes)
        self.validations.add(step, *row)
        self.callbacks.on_validation(dict(zip(self.columns, (step, *row), strict=True)))
        say(self._sentence(step, found, best=best))
        if self.scalars:
            shown = {"loss": loss, **dict(zip(SCORES, means, strict=True))}
            shown |= {f"iou/{name}": value for name, value in zip(self.names, iou, strict=True)}
            shown |= {f"f1/{name}": value for name, value in zip(self.names, f1, strict=True)}
            self.scalars.add(step, {f"validation/{name}": v for name, v in shown.items()})

    def _numbers(self, step: int, found: ValidatedNumbers, table: History, *, best: bool) -> None:
        values = {name: found.score(name) for name in ("loss", *VALUE_SCORES)}
        shown = {name: None if isnan(value) else value for name, value in values.items()}
        loss, *means = shown.values()
        row = (loss, found.scores["num_pixels"], *means, found.seconds)
        table.add(step, *row)
        self.callbacks.on_validation(dict(zip(self.columns, (step, *row), strict=True)))
        told = (f"{name} {'–' if v is None else f'{v:.4g}'}" for name, v in shown.items())
        say(
            f"validation after step {step}: {', '.join(told)}; {found.seconds:.1f} s"
            + "; the best so far" * best
        )
        if self.scalars:
            self.scalars.add(step, {f"validation/{name}": v for name, v in shown.items()})

    def _sentence(self, step: int, found: Validated, *, best: bool) -> str:
        of, names = found.scores, self.names
        sentence = (
            f"validation after step {step}: mean IoU {of['mean_iou']:.4f}, accuracy "
            f"{of['accuracy']:.4f}, loss {found.loss:.4f}"
        )
        if len(names) <= MOST_SAID:
            each = zip(names, of["iou"], strict=True)
            shown = (f"{name} {'–' if iou is None else f'{iou:.4f}'}" for name, iou in each)
            sentence += f"; IoU {', '.join(shown)}"
        return sentence + f"; {found.seconds:.1f} s" + "; the best so far" * best

    def has_validation(self, step: int) -> bool:
        """Whether one was made after `step` steps."""
        rows = [] if self.validations is None else self.validations.rows()
        return any(row["step"] == str(step) for row in rows)

    def best(self) -> tuple[int, float] | None:
        """Step and value of the best validation whose checkpoint is still there."""
        if self.validations is None or self._score is None:
            return None
        name, best = self._score, None
        for row in self.validations.rows():
            step, text = int(row["step"]), row[name]
            if text and checkpoint_of_step(self.folder, step) is not None:
                value = float(text)
                if best is None or better(name, value, best[1]):
                    best = step, value
        return best

    def sync(self) -> None:
        """Have the disk hold the tables, before a checkpoint that counts on them.

        Raises:
            TilenetError: The disk does not take them.
        """
        for table in self._tables:
            table.sync()

    def close(self) -> None:
        """Close the files."""
        for table in self._tables:
            table.close()
        if self.scalars is not None:
            self.scalars.close()
