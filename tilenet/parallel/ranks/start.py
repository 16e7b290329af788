"""MPI's start under a watchdog: without its peers a rank would wait in MPI_Init forever.

Seen on Slurm, where its PMI2 plug-in lost the first messages of a rank. The run file is not read
yet, and ranks have no numbers but those of their launcher.
"""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from tilenet.errors import TilenetError
from tilenet.parallel.health.watchdog import Watchdog

# Task counts that launchers leave in the environment of each task, and the task's number.
# PALS sets PMI's.
STEP_SIZES = (
    "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "JSM_NAMESPACE_SIZE",
    "FLUX_JOB_SIZE",
)
NUMBERS = (
    "PMI_RANK",
    "OMPI_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
    "FLUX_TASK_RANK",
    "SLURM_PROCID",
)

# Ranks that read Python's modules from a file system with much to do come minutes apart.
PATIENCE = "TILENET_START_SECONDS"
START_SECONDS = 1800.0
STARTED = "TILENET_STARTED"


def launched() -> bool:
    """Whether a launcher started several tasks, as far as the environment tells; no MPI yet."""
    return any(os.environ.get(name, "1") not in ("", "1") for name in STEP_SIZES)


@contextmanager
def watched_start() -> Generator[None, None, None]:
    """Have the block, which starts MPI, end within TILENET_START_SECONDS; 0: no limit.

    Raises:
        TilenetError: The variable is not a number.
    """
    if "mpi4py.MPI" in sys.modules or not launched():
        yield
        return
    numbers = (os.environ[name] for name in NUMBERS if name in os.environ)
    number = next((text for text in numbers if text.isdecimal()), "?")
    with Watchdog(_read_patience(), f"rank {number}, before MPI's start", PATIENCE) as watchdog:
        watchdog.arm("MPI_Init, for which all ranks must come,")
        yield


def say_started() -> None:
    """Make the empty file that TILENET_STARTED names: job scripts start a step again without it."""
    if name := os.environ.get(STARTED):
        with suppress(OSError):  # a full disk; the run itself will say so
            Path(name).touch()


def _read_patience() -> float:
    text = os.environ.get(PATIENCE, str(START_SECONDS))
    try:
        return float(text)
    except ValueError as error:
        raise TilenetError(
            f"{PATIENCE} must be a number of seconds (got {text!r}); {START_SECONDS:g} is usual, 0 "
            "switches this watchdog off"
        ) from error
