"""Progress in a batch job's log: a line now and then, in place of a bar."""

import sys
import time
from collections.abc import Mapping
from datetime import timedelta

__all__ = ["LogLines"]

EVERY_S = 30.0


class LogLines:
    """Counts as tqdm does; says the time of day, how much is done and how long the rest will take.

    Args:
        total: Units to be made.
        unit: One of them, `step`.
        done: Made before.
        brief: Whether it is a part of something longer: its end is not said.
        what: Is said before them.
    """

    def __init__(self, total: int, unit: str, done: int, *, brief: bool, what: str | None) -> None:
        self.total, self.unit, self.done = total, unit, done
        self._first, self._brief, self._rest = done, brief, ""
        self._what = "" if what is None else f"{what}: "
        self._began = self._said = time.monotonic()

    def __enter__(self) -> "LogLines":
        return self

    def __exit__(self, *error: object) -> None:
        if not self._brief:
            self._say()

    def update(self, count: int = 1) -> None:
        """So many more are made."""
        self.done += count
        if time.monotonic() - self._said >= EVERY_S:
            self._say()

    def set_postfix(self, shown: Mapping[str, str], refresh: bool = True) -> None:
        """What is said of the last unit, by name."""
        self.set_postfix_str(", ".join(f"{name} {value}" for name, value in shown.items()))

    def set_postfix_str(self, rest: str, refresh: bool = True) -> None:
        """The same in words."""
        self._rest = f", {rest}"

    def _say(self) -> None:
        self._said = time.monotonic()
        seconds, made = self._said - self._began, self.done - self._first
        left, ends = self.total - self.done, ""
        if left <= 0:
            ends = f", in {_text(seconds)}"
        elif made:
            ends = f", {_text(seconds / made * left)} left"
        clock = time.strftime("%Y-%m-%d %H:%M:%S")
        line = f"{clock} {self._what}{self.done} of {self.total} {self.unit}s{ends}{self._rest}"
        print(line, file=sys.stderr, flush=True)


def _text(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
