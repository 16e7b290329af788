"""Scalars of a run for TensorBoard, in a folder beside its tables."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilenet.errors import TilenetError

__all__ = ["FOLDER", "Scalars", "check_tensorboard"]

FOLDER = "tensorboard"


def check_tensorboard() -> None:
    """Refuse to begin what could not be written later.

    Raises:
        TilenetError: The package is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise TilenetError(
            "tensorboard: true needs the package of that name, which is not installed; pip install "
            "tensorboard, or leave the key out: history.csv and validation.csv hold the same"
        )


class Scalars:
    """Writes `<run>/tensorboard`.

    Args:
        run: The run's folder.
        steps_done: What stands there of later steps is hidden: the run repeats them.
    """

    def __init__(self, run: Path, steps_done: int) -> None:
        # Not at the top: torch warns where the package is missing, and few runs ask for it.
        from torch.utils.tensorboard import SummaryWriter

        make: Any = SummaryWriter
        try:
            self._writer = make(str(run / FOLDER), purge_step=steps_done + 1)
        except OSError as error:
            raise TilenetError(
                f"scalars need a folder that can be written ({run / FOLDER}: {error.strerror}); "
                "choose another output"
            ) from error

    def add(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add values by their names; None is left out."""
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._writer.close()
