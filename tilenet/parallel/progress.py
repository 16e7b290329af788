"""The progress bar of rank 0; the other ranks have none."""

import sys
from typing import TYPE_CHECKING

from tqdm import tqdm

from tilenet.errors import one_line

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["progress_bar", "say"]


def progress_bar(
    comm: "MPI.Comm",
    total: int,
    unit: str,
    done: int = 0,
    *,
    brief: bool = False,
    what: str | None = None,
) -> "tqdm[None]":
    """A bar that counts `total` units, `done` of them made before, and says what time is left.

    Args:
        brief: It is a part of something with a bar of its own: shown only where it takes long, and
            not any more once it is closed.
        what: Is said before it.
    """
    # In a batch job's log each update is a line, so there it says something every half minute.
    seconds = 0.5 if sys.stderr.isatty() else 30.0
    return tqdm(
        desc=None if what is None else one_line(what),
        total=total,
        initial=min(done, total),
        unit=unit,
        disable=comm.rank != 0,
        mininterval=seconds,
        maxinterval=2 * seconds,
        leave=not brief,
        delay=seconds if brief else 0,
    )


def say(sentence: str) -> None:
    """Print a sentence to stderr, above the bar."""
    tqdm.write(one_line(sentence), file=sys.stderr)
