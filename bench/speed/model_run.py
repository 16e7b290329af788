"""What bench/speed/model.py measures on the ranks of a job: layers, messages, steps of training."""

import json
import sys
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
        path = f"{folder}/{comm.rank}.tif"
        facts = {"width": 1024, "height": 1024, "count": 4, "dtype": "uint16", "tiled": True}
        with rasterio.open(path, "w", driver="GTiff", **facts) as file:
            file.write(np.ones((4, 1024, 1024), np.uint16))
        with rasterio.open(path) as file:
            began = time.perf_counter()
            file.read()
            read_s = time.perf_counter() - began
    return {
        "message_s": small_s / 2,  # one sent, one received
        "sum_bandwidth": piece.nbytes / sum_s,
        "file_bandwidth": 8 * 2**20 / read_s,
    }


def train(folder: Path, point: dict[str, Any], steps: int) -> list[dict[str, float]]:
    """Seconds of each step of training, of the slowest rank, after those that settle."""
    import numpy as np
    import rasterio
    from mpi4py import MPI

    from tilenet import train as account
    from tilenet.train import train
    from tilenet.training.config.keys import (
        MeshKeys,
        NetworkKeys,
        OptimizerKeys,
        TileKeys,
    )
    from tilenet.training.config.run_file import RunFile
    from tilenet.training.config.validation_keys import ValidationKeys
    from tilenet.training.step import Step, StepResult

    comm, rows = MPI.COMM_WORLD, list[tuple[float, float]]()
    account.try_report = lambda folder, maps: None  # type: ignore[attr-defined,misc]
    height, width = point["image"]
    if comm.rank == 0:
        rng = np.random.default_rng(0)
        for name, bands, most in (("image", 4, 4000), ("labels", 1, 3)):
            facts = {"width": width, "height": height, "count": bands, "tiled": True}
            kind = "uint16" if bands > 1 else "uint8"
            with rasterio.open(folder / f"{name}.tif", "w", "GTiff", dtype=kind, **facts) as file:
                file.write(rng.integers(0, most, (bands, height, width)).astype(kind))
    comm.Barrier()
    grid, ranks = point["grid"], (point["grid"][0] // point["tiles"], point["grid"][1])
    tiles = TileKeys() if point["halo_mode"] == "exchange" else TileKeys(*grid)
    run = RunFile(
        images=[str(folder / "image.tif")],
        labels=[str(folder / "labels.tif")],
        classes=3,
        output=str(folder / "run"),
        network=NetworkKeys(poolings=4, convolutions=2, base=point["base"], norm=point["norm"]),
        mesh=MeshKeys(1, *ranks),
        tiles=tiles,
        halo_mode=point["halo_mode"],
        batch_size=1,
        steps=steps,
        optimizer=OptimizerKeys("sgd", 1e-3),
        validation=ValidationKeys(),
        checkpoint_every=10**6,
        precision="float32",
        device="cpu",
        hang_seconds=600,
    )
    take = Step.take

    def timed(self: Step, *arguments: Any) -> StepResult:
        began, cpu_began = time.perf_counter(), time.process_time()
        done = take(self, *arguments)
        rows.append((time.perf_counter() - began, time.process_time() - cpu_began))
        return done

    Step.take = timed  # type: ignore[method-assign,assignment]
    train(run, overwrite=True, comm=comm)
    mine = np.array(rows)
    slowest = np.zeros_like(mine)
    comm.Allreduce(mine, slowest, op=MPI.MAX)
    return [{"wall": float(wall), "cpu": float(cpu)} for wall, cpu in slowest[2:]]


def main() -> None:
    """Measure what the arguments say; rank 0 prints one line of JSON."""
    from mpi4py import MPI

    what, *rest = sys.argv[1:]
    found: Any
    if what == "layers":
        found = layers(int(rest[0]), int(rest[1]), rest[2])
    elif what == "links":
        found = links()
    else:
        found = train(Path(rest[0]), json.loads(rest[1]), int(rest[2]))
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
