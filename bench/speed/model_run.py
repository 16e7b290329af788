"""What bench/speed/model.py measures on the ranks of a job: layers, messages, steps of training."""

import time
from pathlib import Path
from typing import Any


def layers(size: int, base: int, clock: str) -> list[list[float]]:
    """Seconds of each layer, forward and backward, on each rank at once; the mean over ranks."""
    import numpy as np
    import torch
    from mpi4py import MPI

    from bench.speed.model_prediction import layers_of
    from tilenet.model.network import build_network
    from tilenet.parallel.pipeline import layer_times as measure

    if clock == "cpu":
        # of the clock that `measure_layers` reads
        time.perf_counter = time.process_time
    torch.manual_seed(0)
    network = build_network(layers_of(base, "none")).train()
    image = torch.randn(1, 4, size, size)
    MPI.COMM_WORLD.Barrier()
    found = measure.measure_layers(network, image, "float32", repeats=7)
    mine = np.array([(one.forward_s, one.backward_s) for one in found])
    total = np.zeros_like(mine)
    MPI.COMM_WORLD.Allreduce(mine, total)
    means: list[list[float]] = (total / MPI.COMM_WORLD.size).tolist()
    return means


def links() -> dict[str, float]:
    """What messages between two ranks cost, and bytes of files."""
    import statistics
    import tempfile

    import numpy as np
    import rasterio
    from mpi4py import MPI

    from bench.scenes import write_random

    comm = MPI.COMM_WORLD
    other = 1 - comm.rank

    def median_s(run: Any, repeats: int) -> float:
        took = []
        for _ in range(repeats):
            comm.Barrier()
            began = time.perf_counter()
            run()
            took.append(time.perf_counter() - began)
        return statistics.median(took)

    def swap(num_bytes: int) -> Any:
        out, into = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
        return lambda: comm.Sendrecv(out, other, recvbuf=into, source=other)

    piece = np.ones(1 << 20, np.float32)
    summed = np.zeros_like(piece)
    small_s = median_s(swap(64), 200)
    sum_s = median_s(lambda: comm.Allreduce(piece, summed), 30)
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

    from bench.scenes import write_pair
    from bench.steps import small_run, timed_steps
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
