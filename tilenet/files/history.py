"""`history.csv`: one row per step, floats to full precision."""

import csv
import os
from pathlib import Path

from tilenet.errors import TilenetError

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
)


class History:
    """Appends rows; each stands in the file when `add` returns. Steps count from 1.

    Args:
        path: Of the file.
        steps_done: Rows of later steps are dropped: a run that goes on from a checkpoint repeats
            the steps that it had made since. Where the file has fewer columns, because an older
            version began it, what is missing stays empty: it was not counted, which is not zero.
    """

    def __init__(self, path: Path, steps_done: int) -> None:
        try:
            rows: list[list[str]] = []
            if steps_done > 0 and path.exists():
                rows = _rows(path, steps_done)
            # Aside and renamed: the old rows are never missing from the disk.
            aside = path.with_name(f".{path.name}.part")
            with aside.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
            os.replace(aside, path)
            self._file = path.open("a", newline="")
        except OSError as error:
            raise TilenetError(
                f"history.csv must be writable ({path}: {error.strerror}); choose another output"
            ) from error
        self._writer = csv.writer(self._file, lineterminator="\n")

    def add(self, step: int, *values: float) -> None:
        """Append a row; `values` stand in the order of `COLUMNS`.

        Raises:
            TilenetError: The disk is full.
        """
        try:
            self._writer.writerow([step, *(f"{value:.17g}" for value in values)])
            self._file.flush()
        except OSError as error:
            raise TilenetError(
                f"history.csv must be writable to its end ({self._file.name}: {error.strerror}); "
                "make room there and run again with --resume"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _rows(path: Path, steps_done: int) -> list[list[str]]:
    """Rows of the steps up to `steps_done`, each value under its own name in `COLUMNS`."""
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    names = COLUMNS if not rows or _step(rows[0]) >= 0 else rows[0]
    values = [dict(zip(names, row, strict=False)) for row in rows if 1 <= _step(row) <= steps_done]
    return [[one.get(name, "") for name in COLUMNS] for one in values]


def _step(row: list[str]) -> int:
    return int(row[0]) if row and row[0].isdigit() else -1
