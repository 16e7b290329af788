"""Strong and weak scaling of training on this machine: whole steps of `tilenet train`.

Each run trains a small U-Net (poolings 4, base 16) on random images, one thread a rank:

- `images`: replicas, one image of 512² a rank and no pixel computed twice;
- `overlap`, `exchange`: the ranks share one image. Weak: tiles of 512² a rank; strong: an image of
  1024², whatever the ranks.

Processes side by side share caches, memory and the clock's boost, however little they talk. So
beside each run stands `apart`: as many jobs of one rank each, of the same work, that know nothing
of each other. What training loses is seconds of `apart` over seconds of the run; efficiency in the
usual sense (seconds of 1 rank over seconds of N, for weak scaling) is given too. Runs take turns,
those of claims three and the others one, and each figure is the median over the steps of all of its
turns. Above as many ranks as the machine has
cores only CPU seconds say something.
"""

import statistics
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.report import Claim, Found, at_least, on_ranks
from bench.scenes import write_pair
from bench.steps import small_run, timed_steps

if TYPE_CHECKING:
    from tilenet.training.config.run_file import RunFile

TILE_PX = 512
STRONG_PX = 1024
GRIDS = {1: (1, 1), 2: (1, 2), 4: (2, 2)}
SETTLING = 1  # first steps, which allocate


def run_of(folder: Path, kind: str, scaling: str, ranks: int, steps: int) -> "RunFile":
    """A training run; images and labels are written by rank 0."""
    from tilenet.training.config.keys import MeshKeys

    rows, columns = (1, 1) if kind == "images" else GRIDS[ranks]
    side = STRONG_PX if scaling == "strong" and kind != "images" else 0
    size = side or TILE_PX * rows, side or TILE_PX * columns
    batch = 1 if kind != "images" else 4 if scaling == "strong" else ranks
    files = [str(folder / f"{size[0]}x{size[1]}-{number}.tif") for number in range(batch)]
    return small_run(
        files, str(folder / "run"), steps,
        mesh=MeshKeys(ranks if kind == "images" else 1, rows, columns),
        halo_mode="exchange" if kind == "exchange" else "overlap",
    )  # fmt: skip


def write_images(run: "RunFile") -> None:
    """Those of a run that are not there yet."""
    for path in run.image_paths:
        image = Path(path)
        if not image.exists():
            height, width = image.stem.split("-")[0].split("x")
            write_pair(image.parent, (4, int(height), int(width)), 3, image.stem)


def measure(folder: str, kind: str, scaling: str, ranks: int, apart: bool, steps: int) -> Any:
    """On this job's ranks: the seconds of each step by rank."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    run = run_of(Path(folder), kind, scaling, 1 if apart else ranks, steps)
    if comm.rank == 0:
        write_images(run)
    comm.Barrier()
    one = replace(run, output=f"{run.output}-{comm.rank}") if apart else run
    # Jobs that stand apart begin their steps together too.
    rows = timed_steps(one, MPI.COMM_SELF if apart else comm, comm.Barrier)
    return comm.gather(rows[SETTLING:])


def summary(every: list[list[dict[str, float]]]) -> dict[str, float]:
    """Of a job: the slowest rank's seconds, all ranks' CPU seconds, and shares of the time."""
    steps = list(zip(*every, strict=True))
    seconds = statistics.median(max(one["seconds"] for one in step) for step in steps)
    cpu = statistics.median(sum(one["cpu_seconds"] for one in step) for step in steps)
    total = sum(one["seconds"] for step in steps for one in step)
    shares = {
        f"{name} share": sum(one[f"{name}_seconds"] for step in steps for one in step) / total
        for name in ("read", "reduce", "exchange")
    }
    return {"seconds": seconds, "cpu_seconds": cpu, **shares}


def rows_of(given: dict[tuple[str, str, int, bool], Any]) -> list[dict[str, Any]]:
    """Efficiencies of all jobs."""
    found = {key: summary(every) for key, every in given.items()}
    rows = []
    for (kind, scaling, ranks, apart), one in found.items():
        if apart:
            continue
        alone = found[kind, scaling, 1, False]
        work = 1 if scaling == "strong" else ranks  # of one rank's
        row = {
            "kind": kind,
            "scaling": scaling,
            "ranks": ranks,
            **one,
            "efficiency": alone["seconds"] * work / (ranks * one["seconds"]),
            "CPU efficiency": alone["cpu_seconds"] * work / one["cpu_seconds"],
        }
        beside = found.get((kind, scaling, ranks, True))
        if beside is not None:
            row["apart seconds"] = beside["seconds"]
            row["apart ratio"] = beside["seconds"] / one["seconds"]
            row["apart CPU ratio"] = beside["cpu_seconds"] / one["cpu_seconds"]
        rows.append(row)
    return rows


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """What 2 ranks with a tile of 512² each should reach, with no more cores than ranks."""
    made = []
    for row in rows:
        if row["ranks"] != 2 or "apart ratio" not in row or row["kind"] == "overlap":
            continue
        where = f"{row['kind']}, 2 ranks, {TILE_PX}² each"
        made += [
            at_least(f"{where}: seconds of 1 rank over those of 2", row["efficiency"], 0.95),
            at_least(
                f"{where}: seconds of two jobs apart over one job's", row["apart ratio"], 0.95
            ),
        ]
    return made


def bench(quick: bool) -> Found:
    """Run all in turns."""
    turns, steps, counts = (1, 3, (1, 2)) if quick else (3, 5, (1, 2, 4))
    found: dict[tuple[str, str, int, bool], Any] = {}
    cases = product(
        range(turns), ("images", "overlap", "exchange"), ("weak",) if quick else ("weak", "strong"),
        counts, (False, True),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for turn, kind, scaling, ranks, apart in cases:
            if turn and (scaling == "strong" or ranks > 2 or kind == "overlap"):
                continue
            if apart and (scaling == "strong" or ranks == 1):
                continue
            key = kind, scaling, ranks, apart
            every = on_ranks(ranks, measure, folder, *key, steps + SETTLING)
            before = found.setdefault(key, [[] for _ in every])
            for rank, one in zip(before, every, strict=True):
                rank.extend(one)
    rows = rows_of(found)
    return {"tile_px": TILE_PX, "strong_px": STRONG_PX, "runs": rows}, claims(rows)
