"""Progress in a batch job's log: a line now and then, in place of a bar."""

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

EVERY_S = 30.0


class LogLines:
    """Prints the time of day, how much is done and how long the rest will take.

    Its methods are those of tqdm's bar, which it replaces.

    Args:
        total: Number of units.
        unit: Name of a unit in the singular, such as `step`.
        done: Units that are done already.
        brief: Whether no line is printed at the end, as for a part of a longer work.
        what: Text before the counts.
    """

    def __init__(self, total: int, unit: str, done: int, *, brief: bool, what: str | None) -> None:
        self.total, self.unit, self.done = total, unit, done
        self._first, self._brief, self._postfix = done, brief, ""
        self._what = "" if what is None else f"{what}: "
        self._began = self._printed = time.monotonic()

    def __enter__(self) -> "LogLines":
        return self

    def __exit__(self, *error: object) -> None:
        if not self._brief:
            self._print()

    def update(self, count: int = 1) -> None:
        """Count more units; print a line if the last one is `EVERY_S` old."""
        self.done += count
        if time.monotonic() - self._printed >= EVERY_S:
            self._print()

    def set_postfix(self, figures: Mapping[str, str], refresh: bool = True) -> None:
        """Set the end of the next line from figures by name."""
        self.set_postfix_str(", ".join(f"{name} {value}" for name, value in figures.items()))

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """Set the end of the next line."""
        self._postfix = f", {text}"

    def _print(self) -> None:
        self._printed = time.monotonic()
        seconds, new = self._printed - self._began, self.done - self._first
        left, duration = self.total - self.done, ""
        if left <= 0:
            duration = f", in {timedelta(seconds=round(seconds))}"
        elif new:
            duration = f", {timedelta(seconds=round(seconds / new * left))} left"
        clock = time.strftime("%Y-%m-%d %H:%M:%S")
        counts = f"{self._what}{self.done} of {self.total} {self.unit}s"
        with suppress(OSError):  # no run ends for a log that takes no more
            print(f"{clock} {counts}{duration}{self._postfix}", file=sys.stderr, flush=True)
