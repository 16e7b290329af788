"""Files on a run itself: its keys, its layout on this machine, and where the time went.

`run.yaml` (the keys) and `run.json` (the layout) are written at the start of the run, so that a
report can be made of a run that was killed.
"""

import json
import os
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from operator import add
from pathlib import Path
from typing import Any

from tilenet.data.labels.source import ValidationImage
from tilenet.data.schedule import Sample
from tilenet.geometry.tiles import Tiling
from tilenet.mpi import Intracomm
from tilenet.parallel.health.progress import say
from tilenet.parallel.health.rank_times import RankTimes, write_times
from tilenet.parallel.swap.statistics import SwapCounts
from tilenet.planning.plan import planned_bytes
from tilenet.storage.atomic import write_aside
from tilenet.training.config.read import run_file_text
from tilenet.training.config.run_file import RunFile
from tilenet.training.folder.files import FACTS, KEPT_RUN_FILE
from tilenet.training.setup.run_plan import RunPlan
from tilenet.training.step import StepResult
from tilenet.training.swept import AnyPipe


class RunAccount:
    """Times and swapped bytes of a job's steps, on one rank.

    Attributes:
        num_steps: Number of steps so far.
        times: Sum of their times.
        swaps: Sum of their swaps.
    """

    def __init__(self) -> None:
        self.num_steps, self.times, self.swaps = 0, RankTimes(), SwapCounts()

    def add(self, result: StepResult) -> None:
        """Add the times and swaps of a step."""
        self.num_steps += 1
        self.swaps += result.swaps
        self.times += RankTimes(
            result.seconds,
            result.read_seconds,
            result.exchange_seconds,
            result.reduce_seconds,
            result.swaps.wait_seconds,
            result.peak_bytes,
        )

    def say_swaps(self, comm: Intracomm) -> None:
        """Print the swapped tensors and bytes of all ranks, if any. Collective."""
        # All ranks wait for rank 0, which may be writing a trace: the run's files are complete when
        # any rank returns.
        ranks = comm.allgather((self.swaps, self.times.seconds))
        total = reduce(add, (of_rank for of_rank, _ in ranks))
        if comm.rank > 0 or total.out_count + total.in_count == 0:
            return
        waited, of_seconds = max((of_rank.wait_seconds, lasted) for of_rank, lasted in ranks)
        say(
            f"swapped: {_bytes_text(total.out_bytes)} out ({total.out_count:,} tensors), "
            f"{_bytes_text(total.in_bytes)} in ({total.in_count:,}); of a rank at most "
            f"{_bytes_text(total.peak_host_bytes)} were out and "
            f"{_bytes_text(total.peak_active_bytes)} waited for "
            f"backward on its devices; {waited:.1f} s waited of {of_seconds:.1f} s"
            + " on the rank that waited longest"
            * (len(ranks) > 1)
        )

    def write(self, folder: Path, first: int, comm: Intracomm) -> None:
        """Write `timings.json`. Collective.

        Args:
            folder: Folder of the run.
            first: Number of steps made before this job.
        """
        write_times(comm, folder, self.times, first + 1, first + self.num_steps)


def _bytes_text(num_bytes: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"


MOST_BLOCKS = 256


def keep_run(
    folder: Path,
    run: RunFile,
    plan: RunPlan,
    pipe: AnyPipe,
    sample: Sample,
    validation: Sequence[ValidationImage],
    layout: Sequence[str],
) -> None:
    """Write `run.yaml` and `run.json` next to the checkpoints; on rank 0.

    Args:
        run: Keys of the run, with the values of its plan and of the command line.
        sample: An image or crop of the first step.
        validation: Images and blocks that the network is scored on.
        layout: Lines that describe the ranks and their devices.

    Raises:
        TilenetError: A file cannot be written.
    """
    write_aside(run_file_text(run), folder / KEPT_RUN_FILE, "the run file of a run")
    mesh = plan.mesh
    facts: dict[str, Any] = {
        "began": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": list(layout),
        "working_directory": os.getcwd(),
        "mesh": [mesh.replicas, mesh.rows, mesh.columns],
        "devices": [str(device) for device in pipe.devices],
        "layers": len(plan.record.layers),
        "parameters": sum(parameter.numel() for parameter in pipe.network.parameters()),
        "balance": list(plan.balance),
        "micro_batches": plan.micro_batches,
        "pipeline": plan.pipeline,
        "planned": None if run.plan is None else planned_bytes(Path(run.plan)),
        "tiles": tiling_facts(plan.tiling(*sample.size)),
        "held_out": _held_out(validation),
    }
    write_aside(json.dumps(facts, indent=1), folder / FACTS, "the facts of a run")


def _held_out(validation: Sequence[ValidationImage]) -> dict[str, Any] | None:
    """Held-out blocks of the first image that has some, at most `MOST_BLOCKS`, for the report."""
    for part in validation:
        if part.windows:
            blocks = part.windows[:MOST_BLOCKS]
            windows = [[block.row, block.col, block.height, block.width] for block in blocks]
            return {"image": part.image.path, "labels": part.labels.path, "windows": windows}
    return None


def tiling_facts(tiling: Tiling) -> dict[str, Any]:
    """Return the tiles along rows and columns: start and size of read and of own pixels."""
    axes = {
        name: [[span.start, span.read, span.first, span.own] for span in spans]
        for name, spans in (("rows", tiling.rows), ("columns", tiling.cols))
    }
    rule = tiling.rule
    return {
        "size": [tiling.height, tiling.width],
        **axes,
        "halo_px": rule.halo_px,
        "exchanged": rule.exchanged,
        "exact": rule.exact,
        "work_ratio": tiling.work_ratio,
    }


def versions() -> dict[str, str]:
    """Versions of tilenet and its main dependencies."""
    names = ("tilenet", "torch", "torchgpipe", "mpi4py", "rasterio", "numpy")
    return {name: _version(name) for name in names} | {"python": platform.python_version()}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # for instance a checkout on PYTHONPATH
        return "not installed"
