"""The promise holds for numbers: ranks, tiles, partitions and micro-batches change nothing."""

import csv
from pathlib import Path
from typing import Any

import pytest
from heights import heights, run_file, train_whole
from mpi4py import MPI
from safetensors.torch import load_file

from tilenet.library.whole_run import train
from tilenet.training.config.keys import TileKeys

pytestmark = pytest.mark.ranks((1, 2), (3, 4))

WAYS: dict[str, dict[str, Any]] = {
    "overlap-l1": {"loss": "l1", "tiles": TileKeys(rows=4, columns=3)},
    "overlap-l2": {"micro_batches": 2, "tiles": TileKeys(size_px=40)},
    "exchange-huber": {"loss": "huber", "halo_mode": "exchange"},
    "sweep-l2": {"loss": "l2", "halo_mode": "sweep"},
    "pipeline-huber": {"loss": "huber", "partitions": 2, "micro_batches": 3},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_regression_is_that_of_the_whole_image(
    way: str, comm: MPI.Intracomm, shared_path: Path
) -> None:
    of = heights(shared_path, write=comm.rank == 0)
    comm.Barrier()
    run = run_file(shared_path, of.scene, **WAYS[way])
    assert train(run, comm=comm) == 0
    losses, weights, _ = train_whole(of, run.loss or "l2")
    with (Path(run.output) / "history.csv").open() as file:
        found = [float(row["loss"]) for row in csv.DictReader(file)]
    assert found == pytest.approx(losses, rel=0, abs=1e-12 * max(losses))
    saved = load_file(Path(run.output) / "last" / "weights.safetensors")
    assert saved.keys() == weights.keys()
    for name, wanted in weights.items():
        assert float((saved[name] - wanted).abs().max() / wanted.abs().max()) <= 1e-10
