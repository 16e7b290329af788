"""What a run leaves for people: what was asked, where the time went, and a report."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tilenet.files.validation_image import ValidationImage
from tilenet.parallel.pipeline import Pipe
from tilenet.parallel.quiet import wait_quietly
from tilenet.parallel.rank_times import RankTimes, keep_times
from tilenet.planning.schedule import Sample
from tilenet.report.write import try_report
from tilenet.run.facts import keep_run
from tilenet.run.file import RunFile
from tilenet.run.plan import RunPlan
from tilenet.run.step import StepResult

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["RunAccount"]


class RunAccount:
    """Keeps account of a run on one rank.

    Args:
        folder: Of the run.
        run: As it was asked for: with class weights that are to follow from the labels.
        validation: What the network is scored on.
        layout: What ranks there are, in lines.
        comm: All ranks.
    """

    def __init__(
        self,
        folder: Path,
        run: RunFile,
        validation: Sequence[ValidationImage],
        layout: Sequence[str],
        comm: "MPI.Intracomm",
    ) -> None:
        self._folder, self._run, self._layout, self._comm = folder, run, layout, comm
        self._validation = validation
        self._times, self._made = RankTimes(), 0

    @property
    def seconds(self) -> float:
        """Of the steps so far."""
        return self._times.seconds

    def begin(self, plan: RunPlan, pipe: Pipe, sample: Sample) -> None:
        """Have rank 0 keep the run file, and what became of it.

        Raises:
            TilenetError: They cannot be written.
        """
        if self._comm.rank == 0:
            keep_run(self._folder, self._run, plan, pipe, sample, self._validation, self._layout)

    def add(self, done: StepResult) -> None:
        """Count a step."""
        self._made += 1
        self._times += RankTimes(
            done.seconds,
            done.read_seconds,
            done.exchange_seconds,
            done.reduce_seconds,
            done.swaps.wait_seconds,
            done.peak_bytes,
        )

    def end(self, first: int, *, finished: bool) -> None:
        """Write `timings.json` and the report. Collective.

        Args:
            first: Steps that were made before this job.
            finished: Whether nothing of the run is left to do.
        """
        keep_times(self._comm, self._folder, self._times, first + 1, first + self._made)
        if self._comm.rank == 0:
            # A job that was told to end has no time for maps.
            try_report(self._folder, maps=finished)
        # What a run leaves is there when any rank returns; until then rank 0 has the cores.
        wait_quietly(self._comm)
