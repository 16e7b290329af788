"""Read a run's folder for its report; whatever is missing or broken is None."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tilenet.data.rasters.location import is_remote
from tilenet.data.rasters.stacked_paths import stacked_paths
from tilenet.errors import TilenetError, UsageError
from tilenet.parallel.health.rank_times import TIMINGS
from tilenet.scores import SMALLEST
from tilenet.storage.checkpoints import find_checkpoint, load_json
from tilenet.storage.network_json import NetworkRecord
from tilenet.storage.strict_json import parsed_json
from tilenet.storage.tables import RunTable, read_run_table
from tilenet.training.config.read import read_run_file
from tilenet.training.config.run_file import RunFile
from tilenet.training.folder.files import FACTS, KEPT_RUN_FILE

# Parts of the page under a heading, by the names that templates/page.html lays out.
Section = dict[str, Any]

CONFUSION = "step", "label", "predicted", "pixels"


@dataclass(frozen=True)
class RunView:
    """The folder of a run."""

    folder: Path

    @cached_property
    def run(self) -> RunFile | None:
        """The run file that the run kept."""
        path = self.folder / KEPT_RUN_FILE
        if not path.is_file():
            return None
        try:
            return read_run_file(["-c", str(path)])[0]
        except (TilenetError, UsageError):  # of another version
            return None

    @cached_property
    def run_text(self) -> str | None:
        """The same as text."""
        try:
            return (self.folder / KEPT_RUN_FILE).read_text("utf-8", errors="replace")
        except OSError:
            return None

    @cached_property
    def facts(self) -> dict[str, Any]:
        """`run.json`; empty where it is missing or broken."""
        return _json(self.folder / FACTS)

    @cached_property
    def timings(self) -> dict[str, Any]:
        """`timings.json`; empty where it is missing or broken."""
        return _json(self.folder / TIMINGS)

    @cached_property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint."""
        try:
            return find_checkpoint(self.folder)
        except TilenetError:
            return None

    @cached_property
    def record(self) -> NetworkRecord | None:
        """The network of the newest checkpoint."""
        if self.checkpoint is None:
            return None
        try:
            return NetworkRecord.from_json(load_json(self.checkpoint / "network.json"))
        except TilenetError:
            return None

    @cached_property
    def history(self) -> RunTable | None:
        """A row per step."""
        return read_run_table(self.folder / "history.csv")

    @cached_property
    def validation(self) -> RunTable | None:
        """A row per validation."""
        return read_run_table(self.folder / "validation.csv")

    @cached_property
    def confusion(self) -> RunTable | None:
        """Rows of step, label, predicted class and pixels."""
        table = read_run_table(self.folder / "confusion.csv")
        return table if table and all(name in table.columns for name in CONFUSION) else None

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        if self.record is not None:
            return self.record.classes
        return () if self.run is None else self.run.class_names

    @property
    def numbers(self) -> bool:
        """Whether it is a regression."""
        return self.run is not None and self.run.task == "regression"

    @property
    def score(self) -> str:
        """Name of the score that chooses the best validation."""
        return "mean_iou" if self.run is None else self.run.score

    @property
    def best(self) -> tuple[float, float] | None:
        """Step and score of the best validation; None: there is none."""
        scores = None if self.validation is None else self.validation.column(self.score)
        if self.validation is None or scores is None:
            return None
        row = np.nanargmin(scores) if self.score in SMALLEST else np.nanargmax(scores)
        return float(self.validation.columns["step"][row]), float(scores[row])

    def path_of(self, path: str) -> str:
        """A file of the run, also where the report is made in another directory."""
        where = self.facts.get("working_directory")
        if os.path.exists(path) or not isinstance(where, str):
            return path
        parts = stacked_paths(path)
        return "+".join(p if is_remote(p) else os.path.join(where, p) for p in parts)


def _json(path: Path) -> dict[str, Any]:
    try:
        entries = parsed_json(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}
