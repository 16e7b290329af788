"""What is done to a job, when, and to which rank: chosen from a seed, so that it can be repeated.

A moment is either a time after the start, or a time after something that the job wrote. So some
fall into the start, some into steps, saves and validations, and some to the very end.
"""

import random
from dataclasses import dataclass
from typing import Literal

__all__ = ["KINDS", "Disturbance", "Life", "Moment", "choose"]

Phase = Literal["train", "map"]

# With how often each is drawn. A launcher's Ctrl-C is one; disk: files of rank 0 no longer grow.
KINDS = {
    "kill -9 of a rank": 6,
    "kill -9 of all ranks": 3,
    "kill -9 of the launcher": 2,
    "SIGSEGV": 2,
    "SIGTERM": 2,
    "SIGUSR1": 2,
    "Ctrl-C": 1,
    "SIGSTOP": 1,
    "disk full": 2,
}
TOUCHES_NO_RANK = "kill -9 of all ranks", "kill -9 of the launcher", "Ctrl-C"

# What is waited for, with how often each is drawn, the most of them that are waited for, and the
# most seconds that pass then.
MOMENTS: dict[Phase, dict[str, tuple[int, int, float]]] = {
    "train": {
        "start": (4, 1, 6.0),
        "row of a step": (6, 12, 0.15),
        "save begun": (6, 3, 0.05),
        "save named": (2, 3, 0.005),
        "validation begun": (3, 2, 0.1),
        "last row": (2, 1, 0.6),
    },
    "map": {
        "start": (2, 1, 6.0),
        "tiles kept": (6, 2, 0.05),
        "map copied": (2, 1, 0.02),
        "map placed": (1, 1, 0.005),
    },
}
STARTED = "row of a step", "tiles kept"


@dataclass(frozen=True)
class Moment:
    """When: so many seconds after something was seen for the so manieth time in this life."""

    after: str
    count: int
    seconds: float


@dataclass(frozen=True)
class Disturbance:
    """What is done to a life; `rank` is None where no rank is chosen."""

    kind: str
    rank: int | None
    moment: Moment


@dataclass(frozen=True)
class Life:
    """A job from its start to its end, on so many ranks."""

    ranks: int
    disturbance: Disturbance | None


def choose(key: str, phase: Phase, ranks: int | None, most: int = 4) -> Life:
    """The disturbed life of a key: the same for the same key.

    Args:
        ranks: Of the life; None: 1 to `most`, at random.
    """
    rng = random.Random(key)
    size = ranks or rng.choices(range(1, most + 1), (3, 4, 2, 1)[:most])[0]
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    if kind == "SIGSTOP" and size == 1:  # the other ranks' watchdogs end it
        kind = "kill -9 of a rank"
    found = MOMENTS[phase]
    after = rng.choices(list(found), [weight for weight, _, _ in found.values()])[0]
    if kind == "SIGSTOP":  # before the watchdog is there, nothing ends a rank that stands still
        after = STARTED[phase == "map"]
    _, most, seconds = found[after]
    moment = Moment(after, rng.randint(1, most), rng.uniform(0, seconds))
    rank: int | None = rng.randrange(size)
    if kind in TOUCHES_NO_RANK:
        rank = None
    if kind == "disk full":
        rank = 0  # the one that writes
    return Life(size, Disturbance(kind, rank, moment))
