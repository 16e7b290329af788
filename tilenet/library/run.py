"""A training run read from its folder: curves, scores and weights."""

from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tilenet.errors import TilenetError
from tilenet.storage.checkpoints import WEIGHTS, load_tensors
from tilenet.storage.tables import read_run_table
from tilenet.storage.whole_checkpoint import checked_checkpoint

Columns = dict[str, NDArray[np.float64]]


class Run:
    """A training run, read from its folder. Nothing here is collective.

        run = tilenet.Run("run")
        run.history["loss"]                        # (steps,)
        net.load_state_dict(run.weights("best"))   # under the module's own names

    Args:
        folder: The run's `output`.
        finished: Whether the run made all of its steps; `resume` continues one that was stopped.
    """

    def __init__(self, folder: str | Path, *, finished: bool = True) -> None:
        self.folder, self.finished = Path(folder).absolute(), finished

    def __fspath__(self) -> str:
        return str(self.folder)

    @property
    def history(self) -> Columns:
        """Columns of `history.csv`, float64 of one length: `step`, `loss`, `seconds` and more.

        Raises:
            TilenetError: The run's folder is not there.
        """
        return self._columns("history.csv")

    @property
    def validation(self) -> Columns:
        """Columns of `validation.csv`, one value per validation; empty where there was none."""
        return self._columns("validation.csv")

    def weights(self, which: str = "last") -> dict[str, Tensor]:
        """Weights and buffers of a checkpoint, on the CPU, by the network's own names.

        Args:
            which: `last`, `best`, or `checkpoints/step-…`.

        Raises:
            TilenetError: There is no such checkpoint, or it is broken.
        """
        return load_tensors(checked_checkpoint(self.folder / which) / WEIGHTS)

    @property
    def facts(self) -> dict[str, str]:
        """Names and values that describe the run in a line or a table."""
        if not self.folder.is_dir():
            return {"folder": f"{self.folder}, which is not there"}
        history, validation = self.history, self.validation
        facts = {"folder": str(self.folder), "steps": str(len(history.get("step", ())))}
        if "loss" in history:
            facts["loss"] = f"{history['loss'][-1]:.4f}"
        for name in ("mean_iou", "accuracy", "rmse", "r2"):
            if name in validation:
                facts[name] = f"{validation[name][-1]:.4f}"
        if not self.finished:
            facts["stopped"] = "resume=True goes on"
        return facts

    def __repr__(self) -> str:
        return f"<Run {', '.join(f'{name}: {value}' for name, value in self.facts.items())}>"

    def _repr_html_(self) -> str:
        cells = (
            f"<tr><th>{name}</th><td>{escape(value)}</td></tr>"
            for name, value in self.facts.items()
        )
        return f"<table>{''.join(cells)}</table>"

    def _columns(self, name: str) -> Columns:
        if not self.folder.is_dir():
            raise TilenetError(
                f"a run is read from its folder ({self.folder} is none); name its output"
            )
        table = read_run_table(self.folder / name)
        return {} if table is None else table.columns
