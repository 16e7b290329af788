"""`run.yaml` and `run.json`: what a run was asked, and what became of it on this machine.

Both are written as the run begins, so that a report can be made of one that was killed.
"""

import json
import os
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tilenet.files.aside import write_aside
from tilenet.files.validation_image import ValidationImage
from tilenet.geometry.tiles import Tiling
from tilenet.parallel.pipeline import Pipe
from tilenet.planning.plan import planned_bytes
from tilenet.planning.schedule import Sample
from tilenet.run.file import RunFile
from tilenet.run.file_text import run_file_text
from tilenet.run.folder import FACTS, KEPT_RUN_FILE
from tilenet.run.plan import RunPlan

__all__ = ["keep_run", "tiling_facts"]

MOST_BLOCKS = 256


def keep_run(
    folder: Path,
    run: RunFile,
    plan: RunPlan,
    pipe: Pipe,
    sample: Sample,
    validation: Sequence[ValidationImage],
    layout: Sequence[str],
) -> None:
    """Write both files beside the checkpoints; on rank 0.

    Args:
        run: As it was asked for, with the values of its plan and of the command line.
        sample: An image or crop of the first step.
        validation: What the network is scored on.
        layout: What ranks there are, in lines.

    Raises:
        TilenetError: They cannot be written.
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
        "parameters": sum(p.numel() for p in pipe.network.parameters()),
        "balance": list(plan.balance),
        "micro_batches": plan.micro_batches,
        "planned": None if run.plan is None else planned_bytes(Path(run.plan)),
        "tiles": tiling_facts(plan.tiling(*sample.size)),
        "held_out": _held_out(validation),
    }
    write_aside(json.dumps(facts, indent=1), folder / FACTS, "the facts of a run")


def _held_out(validation: Sequence[ValidationImage]) -> dict[str, Any] | None:
    """Held-out blocks of the first image that has some, as many as a report looks at."""
    for part in validation:
        if part.windows:
            shown = part.windows[:MOST_BLOCKS]
            windows = [[w.row, w.col, w.height, w.width] for w in shown]
            return {"image": part.image.path, "labels": part.labels.path, "windows": windows}
    return None


def tiling_facts(tiling: Tiling) -> dict[str, Any]:
    """Where tiles lie along rows and columns: start and size that each reads, and that it owns."""
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
    """Of tilenet and what it stands on."""
    names = ("tilenet", "torch", "torchgpipe", "mpi4py", "rasterio", "numpy")
    return {name: version(name) for name in names} | {"python": platform.python_version()}
