"""Strong and weak scaling of training on this machine: whole steps of `tilenet train`.

    python -m bench.scale.scaling [--quick]

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

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.report import Claim, at_least, mpiexec, report

if TYPE_CHECKING:
    from tilenet.training.config.run_file import RunFile

TILE_PX = 512
STRONG_PX = 1024
GRIDS = {1: (1, 1), 2: (1, 2), 4: (2, 2)}
SETTLING = 1  # first steps, which allocate


def write_image(folder: Path, name: str, height: int, width: int) -> tuple[str, str]:
    """Random pixels and labels; their paths."""
    import numpy as np
    import rasterio

    rng = np.random.default_rng(height + width)
    paths = str(folder / f"{name}.tif"), str(folder / f"{name}_labels.tif")
    pixels = rng.integers(1, 4000, (4, height, width)).astype("uint16")
    labels = rng.integers(0, 3, (1, height, width)).astype("uint8")
    grid = {"crs": "EPSG:32630", "transform": rasterio.Affine(2, 0, 5e5, 0, -2, 4e6)}
    grid |= {"tiled": True, "blockxsize": 256, "blockysize": 256, "driver": "GTiff"}
    for path, values in zip(paths, (pixels, labels), strict=True):
        size = {"count": len(values), "height": height, "width": width}
        with rasterio.open(path, "w", dtype=values.dtype.name, **grid, **size) as file:
            file.write(values)
    return paths


def run_of(folder: Path, kind: str, scaling: str, ranks: int, steps: int) -> "RunFile":
    """A training run; images and labels are written by rank 0."""
    from tilenet.training.config.keys import MeshKeys, NetworkKeys, OptimizerKeys
    from tilenet.training.config.run_file import RunFile
    from tilenet.training.config.validation_keys import ValidationKeys

    rows, columns = (1, 1) if kind == "images" else GRIDS[ranks]
    side = STRONG_PX if scaling == "strong" and kind != "images" else 0
    size = side or TILE_PX * rows, side or TILE_PX * columns
    batch = 1 if kind != "images" else 4 if scaling == "strong" else ranks
    files = [str(folder / f"{size[0]}x{size[1]}-{number}") for number in range(batch)]
    return RunFile(
        images=[f"{one}.tif" for one in files],
        labels=[f"{one}_labels.tif" for one in files],
        classes=3,
        output=str(folder / "run"),
        network=NetworkKeys(poolings=4, convolutions=2, base=16, norm="none"),
        mesh=MeshKeys(ranks if kind == "images" else 1, rows, columns),
        halo_mode="exchange" if kind == "exchange" else "overlap",
        batch_size=batch,
        steps=steps,
        optimizer=OptimizerKeys("sgd", 1e-3),
        validation=ValidationKeys(),
        checkpoint_every=10**6,
        precision="float32",
        device="cpu",
        hang_seconds=600,
    )


def write_images(run: "RunFile") -> None:
    """Those of a run that are not there yet."""
    for path in run.image_paths:
        image = Path(path)
        if not image.exists():
            height, width = image.stem.split("-")[0].split("x")
            write_image(image.parent, image.stem, int(height), int(width))


def measure(folder: str, kind: str, scaling: str, ranks: int, steps: int, *, apart: bool) -> None:
    """On this job's ranks: rank 0 prints a JSON line with the seconds of each step by rank."""
    import torch
    from mpi4py import MPI

    from tilenet import train as account
    from tilenet.train import train
    from tilenet.training.step import Step, StepResult

    account.try_report = lambda folder, maps: None  # type: ignore[attr-defined,misc]
    comm, rows = MPI.COMM_WORLD, list[dict[str, float]]()
    run = run_of(Path(folder), kind, scaling, 1 if apart else ranks, steps)
    if comm.rank == 0:
        write_images(run)
    comm.Barrier()
    take = Step.take

    def timed(self: Step, *arguments: Any) -> StepResult:
        comm.Barrier()  # jobs that stand apart begin their steps together too
        began, cpu_began = time.perf_counter(), time.process_time()
        done = take(self, *arguments)
        rows.append(
            {
                "seconds": time.perf_counter() - began,
                "cpu_seconds": time.process_time() - cpu_began,
                "read_seconds": done.read_seconds,
                "reduce_seconds": done.reduce_seconds,
                "exchange_seconds": done.exchange_seconds,
            }
        )
        return done

    Step.take = timed  # type: ignore[assignment,method-assign]
    torch.set_num_threads(1)
    place = f"{run.output}-{comm.rank}" if apart else run.output
    train(replace(run, output=place), overwrite=True, comm=MPI.COMM_SELF if apart else comm)
    every = comm.gather(rows[SETTLING:])
    if comm.rank == 0:
        print(json.dumps(every))


def steps_of(folder: str, kind: str, scaling: str, ranks: int, steps: int, *, apart: bool) -> Any:
    """Run a job; its steps, by rank."""
    more = ["--apart"] if apart else []
    arguments = ["--measure", folder, kind, scaling, str(ranks), str(steps), *more]
    return json.loads(mpiexec(ranks, sys.argv[0], *arguments).splitlines()[-1])


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


def main() -> None:
    """Run all and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        folder, kind, scaling, ranks, steps = given.measure
        measure(folder, kind, scaling, int(ranks), int(steps), apart=given.apart)
        return
    turns, steps, counts = (1, 3, (1, 2)) if given.quick else (3, 5, (1, 2, 4))
    found: dict[tuple[str, str, int, bool], Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(turns):
            for kind in ("images", "overlap", "exchange"):
                for scaling in ("weak",) if given.quick else ("weak", "strong"):
                    for ranks in counts:
                        if turn and (scaling == "strong" or ranks > 2 or kind == "overlap"):
                            continue
                        for apart in (False, True):
                            if apart and (scaling == "strong" or ranks == 1):
                                continue
                            key = kind, scaling, ranks, apart
                            every = steps_of(folder, *key[:3], steps + SETTLING, apart=apart)
                            before = found.setdefault(key, [[] for _ in every])
                            for rank, one in zip(before, every, strict=True):
                                rank.extend(one)
    rows = rows_of(found)
    for row in rows:
        print(row)
    report("scaling", {"tile_px": TILE_PX, "strong_px": STRONG_PX, "runs": rows}, claims(rows))


if __name__ == "__main__":
    main()
