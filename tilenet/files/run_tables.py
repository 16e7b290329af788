"""Read the tables that a run leaves: columns of numbers, whatever version wrote them."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tilenet.files.history import whole_lines
from tilenet.files.plain_file import refuse_special

__all__ = ["RunTable", "read_run_table"]


@dataclass(frozen=True)
class RunTable:
    """Columns of float64, NaN where there is no number.

    Attributes:
        columns: By their names; all of one length.
    """

    columns: dict[str, NDArray[np.float64]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def column(self, name: str) -> NDArray[np.float64] | None:
        """A column; None: there is none, or nothing stands in it."""
        values = self.columns.get(name)
        return None if values is None or np.isnan(values).all() else values

    def seconds(self, name: str) -> NDArray[np.float64]:
        """A column of what adds up; zeros for what was not counted."""
        values = self.columns.get(name)
        return np.zeros(len(self)) if values is None else np.nan_to_num(values)


def read_run_table(path: Path) -> RunTable | None:
    """Read a table; None: it is missing, cannot be read or has no whole row.

    A last row that is cut short, because a run is killed or goes on, is left out; so are rows of
    text.
    """
    try:
        refuse_special(path)
        lines, _ = whole_lines(path.read_bytes())
        text = lines.decode("utf-8", errors="replace").replace("\0", "")
        rows = csv.reader(io.StringIO(text, newline=""))
        names = next(rows, [])
        kept = [[_number(text) for text in row] for row in rows if row and len(row) == len(names)]
    except (OSError, ValueError, csv.Error):
        return None
    kept = [row for row in kept if np.isfinite(row[0])]
    if not kept:
        return None
    values = np.array(kept, np.float64).T
    return RunTable(dict(zip(names, values, strict=True)))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
