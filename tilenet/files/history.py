"""Tables of a run, `history.csv` first: rows by step, floats to full precision."""

import csv
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tilenet.errors import TilenetError
from tilenet.files.plain_file import refuse_special

__all__ = ["COLUMNS", "History"]

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


class History:
    """Appends rows; each stands in the file when `add` returns. Steps count from 1.

    Args:
        path: Of the file.
        steps_done: Rows of later steps are dropped: a run that goes on from a checkpoint repeats
            the steps that it had made since. Where the file has fewer columns, because an older
            version began it, what is missing stays empty: it was not counted, which is not zero.
        columns: Their names, `step` first.
    """

    def __init__(self, path: Path, steps_done: int, columns: Sequence[str] = COLUMNS) -> None:
        self.path = path
        try:
            rows: list[list[str]] = []
            if steps_done > 0 and path.exists():
                rows = _rows(path, steps_done, columns)
            # Aside and renamed: the old rows are never missing from the disk.
            aside = path.with_name(f".{path.name}.part")
            with aside.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([columns, *rows])
            os.replace(aside, path)
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
            self._writer.writerows(texts)
            self._file.flush()
        except OSError as error:
            raise TilenetError(
                f"{self.path.name} must be writable to its end ({self.path}: {error.strerror}); "
                "make room there and run again with --resume"
            ) from error

    def rows(self) -> list[dict[str, str]]:
        """What stands in the file, each value by the name of its column."""
        with self.path.open(newline="") as file:
            return list(csv.DictReader(file))

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # `add` has said what could not be written
            self._file.close()


def _rows(path: Path, steps_done: int, columns: Sequence[str]) -> list[list[str]]:
    """Rows of the steps up to `steps_done`, each value under its own name in `columns`."""
    refuse_special(path)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        names = columns if not rows or _step(rows[0]) >= 0 else rows[0]
        values = [
            dict(zip(names, row, strict=False)) for row in rows if 1 <= _step(row) <= steps_done
        ]
        steps = [row[0] for row in rows if 1 <= _step(row) <= steps_done]
        kept = [
            [step, *(one.get(name, "") for name in columns[1:])]
            for step, one in zip(steps, values, strict=True)
        ]
        for row in kept:
            [float(cell or 0) for cell in row]
    except (ValueError, csv.Error) as error:
        raise TilenetError(
            f"a table of a run must hold numbers ({path}: {error}); mend or remove it, and run "
            "again with --resume"
        ) from error
    return kept


def _step(row: list[str]) -> int:
    return int(row[0]) if row and re.fullmatch(r"[0-9]{1,18}", row[0]) else -1
