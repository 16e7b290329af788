"""Tables of a run, `history.csv` first: rows by step, floats to full precision."""

import csv
import io
import os
import re
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tilenet.errors import TilenetError
from tilenet.storage.atomic import aside

COLUMNS = (
    "step",
    "loss",
    "weight_sum",
    "seconds",
    "read_seconds",
    "reduce_seconds",
    "peak_active_bytes",
    "swap_out_bytes",
    "swap_out_count",
    "swap_in_bytes",
    "swap_in_count",
    "peak_host_bytes",
    "swap_wait_seconds",
    "learning_rate",
    "exchange_seconds",
    "peak_bytes",
)

STEP = re.compile(r"[1-9][0-9]{0,17}")
NUMBER = re.compile(
    r"[-+]?(?:nan|inf|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?)", re.ASCII | re.IGNORECASE
)


class History:
    """Appends rows; each stands in the file when `add` returns. Steps count from 1.

    Args:
        steps_done: Rows of later steps are dropped: a run that goes on from a checkpoint repeats
            the steps that it had made since. Where the file has fewer columns, because an older
            version began it, missing values stay empty: they were not counted, which is not zero.
        columns: Names of the columns, `step` first.
        of_steps: Rows of other steps are dropped, too; None: of none.
        whole: Whether there must be one row for each step from the first one's to `steps_done`.

    Attributes:
        torn: Whether the last row was cut off, by a kill or a full disk, and is dropped.

    Raises:
        TilenetError: It cannot be written, a row before the last is damaged, or rows are missing.
    """

    def __init__(
        self,
        path: Path,
        steps_done: int,
        columns: Sequence[str] = COLUMNS,
        of_steps: Container[int] | None = None,
        *,
        whole: bool = False,
    ) -> None:
        self.path, self.torn = path, False
        try:
            rows: list[list[str]] = []
            if steps_done > 0 and path.exists():
                lines, left = _whole_lines(path)
                if not lines:
                    raise _damaged(path, 1, "the names of the columns are missing")
                self.torn = bool(left)
                rows = _rows(path, lines, steps_done, columns, of_steps)
            if whole:
                _check_whole(path, rows, steps_done)
            # Aside and renamed: the old rows are never missing from the disk.
            with aside(path) as part, part.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([columns, *rows])
            self._file = path.open("a", newline="")
        except OSError as error:
            raise TilenetError(
                f"{path.name} must be writable ({path}: {error.strerror}); choose another output"
            ) from error
        self._writer = csv.writer(self._file, lineterminator="\n")

    def add(self, step: int, *values: float | None) -> None:
        """Append a row; `values` stand in the order of the columns, None leaves one empty.

        Raises:
            TilenetError: The disk is full.
        """
        self.add_rows([(step, *values)])

    def add_rows(self, rows: Sequence[Sequence[float | None]]) -> None:
        """Append several; arguments and errors as above, each row with its step."""
        texts = [["" if v is None else f"{v:.17g}" for v in row] for row in rows]
        try:
            self._check_place()
            self._writer.writerows(texts)
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def _check_place(self) -> None:
        """Refuse to write to a file that no longer is the one at the path.

        Raises:
            OSError: It is missing, as in a folder that was moved.
            TilenetError: It is another one, as after an edit in place.
        """
        if not os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path)):
            raise TilenetError(
                f"{self.path.name} may not be replaced while a run writes it ({self.path}: another "
                "file than the run's); put the run's rows back and run again with --resume"
            )

    def sync(self) -> None:
        """Have the disk hold all rows, before a checkpoint that counts their steps as made.

        Raises:
            TilenetError: The disk does not take them.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error

    def rows(self) -> list[dict[str, str]]:
        """The rows of the file, each value by the name of its column."""
        with self.path.open(newline="") as file:
            return list(csv.DictReader(file))

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # `add` has raised the error
            self._file.close()

    def _unwritable(self, error: OSError) -> TilenetError:
        return TilenetError(
            f"{self.path.name} must be writable to its end ({self.path}: {error.strerror}); "
            "make room there and run again with --resume"
        )


def _whole_lines(path: Path) -> tuple[str, bytes]:
    """Return the complete lines of a table, and the rest of a row that was cut off.

    A number that lacks its last digits is a number, too, so that only the line's end tells.
    """
    lines, end, left = path.read_bytes().rpartition(b"\n")
    return (lines + end).decode("utf-8", errors="replace"), left


def _rows(
    path: Path,
    lines: str,
    steps_done: int,
    columns: Sequence[str],
    of_steps: Container[int] | None,
) -> list[list[str]]:
    """Rows of the steps up to `steps_done`, each value under its own name in `columns`."""
    rows: list[list[str]] = []
    table = csv.DictReader(io.StringIO(lines, newline=""))
    try:
        for row in table:
            step, *cells = (row.get(name) or "" for name in columns)
            if not STEP.fullmatch(step):
                raise _damaged(path, table.line_num, f"{step!r} is no step")
            if int(step) > steps_done or (of_steps is not None and int(step) not in of_steps):
                continue
            for cell in cells:
                if cell and not NUMBER.fullmatch(cell):
                    raise _damaged(path, table.line_num, f"{cell!r} is no number")
            rows.append([step, *cells])
    except csv.Error as error:
        raise _damaged(path, table.reader.line_num, str(error)) from error
    return rows


def _check_whole(path: Path, rows: Sequence[Sequence[str]], steps_done: int) -> None:
    """Refuse a table that lacks steps or has one twice: two jobs wrote it, or it was edited.

    It may begin at any step, for a run begins another table where its own was moved away.
    """
    steps = [*(int(row[0]) for row in rows), steps_done + 1]
    for step, following in pairwise(steps):
        if following != step + 1:
            raise TilenetError(
                f"{path.name} must hold one row for each step up to the checkpoint of step "
                f"{steps_done} ({path}: step {following} follows step {step}); put back a whole "
                "copy of it, or move it away and the run begins a new one"
            )


def _damaged(path: Path, line: int, what: str) -> TilenetError:
    return TilenetError(
        f"a table of a run must hold numbers ({path}, line {line}: {what}); mend or delete that "
        "line, or remove the file, and run again with --resume"
    )


@dataclass(frozen=True)
class RunTable:
    """Columns of float64, NaN where there is no number.

    Attributes:
        columns: Values of each column by its name; all of one length.
    """

    columns: dict[str, NDArray[np.float64]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def column(self, name: str) -> NDArray[np.float64] | None:
        """A column; None: it is missing or empty."""
        values = self.columns.get(name)
        return None if values is None or np.isnan(values).all() else values

    def seconds(self, name: str) -> NDArray[np.float64]:
        """Return a column of numbers that add up, with zeros for numbers that were not counted."""
        values = self.columns.get(name)
        return np.zeros(len(self)) if values is None else np.nan_to_num(values)


def read_run_table(path: Path) -> RunTable | None:
    """Read a table; None: it is missing, cannot be read or has no whole row.

    A last row that is cut short, because a run is killed or goes on, is left out; so are rows of
    text.
    """
    try:
        lines, _ = _whole_lines(path)
        table = csv.reader(io.StringIO(lines.replace("\0", ""), newline=""))
        names = next(table, [])
        rows = [[_number(text) for text in row] for row in table if row and len(row) == len(names)]
    except (OSError, ValueError, csv.Error):
        return None
    rows = [row for row in rows if np.isfinite(row[0])]
    if not rows:
        return None
    values = np.array(rows, np.float64).T
    return RunTable(dict(zip(names, values, strict=True)))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
