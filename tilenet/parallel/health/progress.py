"""A progress bar, which rank 0 alone has, and sentences of the run above it."""

import sys
from contextlib import suppress

from tqdm import tqdm

from tilenet.errors import one_line
from tilenet.mpi import Comm
from tilenet.parallel.health.log_lines import LogLines


def progress_bar(
    comm: Comm,
    total: int,
    unit: str,
    done: int = 0,
    *,
    brief: bool = False,
    what: str | None = None,
) -> "tqdm[None] | LogLines":
    """A bar that counts units, with the time that is left; without a terminal, lines in its place.

    Args:
        done: Units done before.
        brief: Whether it is a part of something with a bar of its own: it appears only where it
            takes long, and vanishes when it is closed.
        what: Text before the bar.
    """
    what, done = None if what is None else one_line(what), min(done, total)
    if comm.rank == 0 and not sys.stderr.isatty():
        return LogLines(total, unit, done, brief=brief, what=what)
    return tqdm(
        desc=what,
        total=total,
        initial=done,
        unit=unit,
        disable=comm.rank != 0,
        mininterval=0.5,
        maxinterval=1.0,
        leave=not brief,
        delay=0.5 if brief else 0,
    )


def say(sentence: str) -> None:
    """Print a sentence to stderr, above the bar; no run ends for a log that takes no more."""
    with suppress(OSError):
        tqdm.write(one_line(sentence), file=sys.stderr)
