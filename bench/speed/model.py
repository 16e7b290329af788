"""How well are the seconds of a training step predicted? Tested on runs it has not seen.

The closed form behind `tilenet plan` is calibrated on this machine: seconds of the layers of two
networks (base 16 and 32) on a tile of 384², by one rank alone and by as many as there are cores;
what a message and a byte between two ranks cost; what a byte of a file costs; and whole steps on
small tiles over the sum of their layers, the median of three. It is then asked for whole steps of
`tilenet train` that it has not seen: other tiles, 1 to 4 ranks, both halo modes, other widths
(layer by layer, with what the two networks took over the roofline, which has convolutions of at
least 16 channels, as processors compute them), several tiles a rank, batch norm. Ranks that share a
core take turns.

Seconds are the clock's, medians over steps; with --cpu those that the processor of the busiest rank
spent, for a machine that others use too, where waiting for messages counts in part. Quick: fewer
and smaller runs.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.report import Found, at_most, on_ranks
from bench.scenes import write_pair, write_random
from bench.speed.model_prediction import SEEN_BASES, SEEN_PX, Point, layers_of, predicted
from bench.steps import in_turns, small_run, timed_steps

GOAL = 0.2


SEEN = Point(320, 1), Point(SEEN_PX, 1), Point(SEEN_PX, 1, base=SEEN_BASES[1])
POINTS = (
    Point(256, 1), Point(512, 1), Point(768, 1), Point(512, 1, base=8), Point(512, 1, base=24),
    Point(512, 1, base=32), Point(512, 1, tiles=3), Point(512, 1, norm="batch"),
    *(Point(size, ranks, mode) for mode in ("overlap", "exchange") for ranks in (2, 4)
      for size in (256, 512)),
    *(Point(512, 2, mode, base=24) for mode in ("overlap", "exchange")),
    *(Point(512, 2, mode, norm="batch") for mode in ("overlap", "exchange")),
)  # fmt: skip
QUICK = (Point(256, 1), Point(256, 2), Point(256, 2, "exchange"), Point(256, 1, base=24))


def layers(size: int, base: int, clock: str) -> list[list[float]]:
    """Seconds of each layer, forward and backward, on each rank at once; the mean over ranks."""
    import numpy as np
    import torch
    from mpi4py import MPI

    from tilenet.model.network import build_network
    from tilenet.planning.time.measured import measure_layers

    if clock == "cpu":
        # of the clock that `measure_layers` reads
        time.perf_counter = time.process_time
    torch.manual_seed(0)
    network = build_network(layers_of(base, "none")).train()
    image = torch.randn(1, 4, size, size)
    MPI.COMM_WORLD.Barrier()
    found = measure_layers(network, image, "float32", repeats=7)
    mine = np.array([(one.forward_s, one.backward_s) for one in found])
    total = np.zeros_like(mine)
    MPI.COMM_WORLD.Allreduce(mine, total)
    means: list[list[float]] = (total / MPI.COMM_WORLD.size).tolist()
    return means


def links() -> dict[str, float]:
    """What messages between two ranks cost, and bytes of files."""
    import numpy as np
    import rasterio
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    other = 1 - comm.rank

    out, into = np.ones(64, np.uint8), np.zeros(64, np.uint8)
    piece = np.ones(1 << 20, np.float32)
    summed = np.zeros_like(piece)
    swap: dict[str, Callable[[], None]] = {
        "": lambda: comm.Sendrecv(out, other, recvbuf=into, source=other)
    }
    sums: dict[str, Callable[[], None]] = {"": lambda: comm.Allreduce(piece, summed)}
    small_s = in_turns(swap, 200, comm.Barrier)[""]
    sum_s = in_turns(sums, 30, comm.Barrier)[""]
    with tempfile.TemporaryDirectory() as folder:
        path = write_random(Path(folder) / "image.tif", (4, 1024, 1024))
        with rasterio.open(path) as file:
            began = time.perf_counter()
            file.read()
            read_s = time.perf_counter() - began
    return {
        "message_s": small_s / 2,  # one sent, one received
        "sum_bandwidth": piece.nbytes / sum_s,
        "file_bandwidth": 8 * 2**20 / read_s,
    }


def train(folder: str, point: dict[str, Any], steps: int) -> list[dict[str, float]]:
    """Seconds of each step of training, of the slowest rank, after those that settle."""
    from mpi4py import MPI

    from tilenet.training.config.keys import MeshKeys, TileKeys

    comm, grid = MPI.COMM_WORLD, point["grid"]
    height, width = point["image"]
    if comm.rank == 0:
        write_pair(Path(folder), (4, height, width), 3)
    comm.Barrier()
    run = small_run(
        [f"{folder}/image.tif"], f"{folder}/run", steps, point["base"], norm=point["norm"],
        mesh=MeshKeys(1, grid[0] // point["tiles"], grid[1]), halo_mode=point["halo_mode"],
        tiles=TileKeys() if point["halo_mode"] == "exchange" else TileKeys(*grid),
    )  # fmt: skip
    every = comm.allgather(timed_steps(run, comm))
    return [
        {"wall": max(r["seconds"] for r in ranks), "cpu": max(r["cpu_seconds"] for r in ranks)}
        for ranks in list(zip(*every, strict=True))[2:]
    ]


def bench(quick: bool, cpu: bool = False) -> Found:
    """Calibrate, measure and compare."""
    clock, cores = "cpu" if cpu else "wall", len(os.sched_getaffinity(0))

    def measured(point: Point) -> float:
        says = {**vars(point), "image": point.image, "grid": point.grid}
        with tempfile.TemporaryDirectory() as folder:
            rows = on_ranks(point.ranks, train, folder, says, 5 if quick else 12)
        return float(statistics.median(row[clock] for row in rows))

    facts: dict[str, Any] = {
        "clock": clock,
        "cores": cores,
        "layers": {
            base: {
                ranks: on_ranks(ranks, layers, SEEN_PX, base, clock) for ranks in {1, min(cores, 2)}
            }
            for base in SEEN_BASES
        },
        "links": on_ranks(2, links),
        "step_by_layers": 1.0,
    }
    # Layers one by one are not a step: caches, and the loss, labels, zeros and the optimizer
    facts["step_by_layers"] = statistics.median(
        [measured(point) / predicted(point, facts)["step_s"] for point in SEEN]
    )
    rows = []
    for point in QUICK if quick else POINTS:
        says, took = predicted(point, facts), measured(point)
        rows.append({**vars(point), "measured_s": took, **says, "error": says["step_s"] / took - 1})
    errors = [abs(row["error"]) for row in rows]
    figures = {
        "clock": clock,
        "calibrated on": {"tile_px": SEEN_PX, "bases": list(SEEN_BASES),
                          "step_by_layers": facts["step_by_layers"], **facts["links"]},
        "points": rows,
    }  # fmt: skip
    return figures, [
        at_most("largest error of a step's predicted seconds", max(errors), GOAL),
        at_most("median error", statistics.median(errors), GOAL / 2),
    ]
