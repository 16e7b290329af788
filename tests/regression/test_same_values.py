"""The promise holds for numbers: ranks, tiles, partitions and micro-batches change nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from heights import NODATA, heights, run_file, train_whole
from left_by_runs import farthest, losses, weights
from mpi4py import MPI

from tilenet.library.whole_run import train
from tilenet.training.config.keys import TileKeys
from tilenet.training.config.validation_keys import ValidationKeys

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
    wanted, trained, _ = train_whole(of, run.loss or "l2")
    assert losses(run) == pytest.approx(wanted, rel=0, abs=1e-12 * max(wanted))
    assert farthest(weights(run), trained) <= 1e-10


@pytest.mark.ranks(1)
def test_a_score_without_a_value_is_said_once(
    comm: MPI.Intracomm, shared_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shared_path / "held"
    folder.mkdir()
    of, held = heights(shared_path, write=True), heights(folder, write=True, size=(60, 71))
    labels = folder / "heights.tif"
    with rasterio.open(labels, "r+") as file:
        values = file.read(1)
        file.write(np.where(np.isfinite(values) & (values != NODATA), 2.5, values), 1)
    keys = ValidationKeys(str(held.scene.image), str(labels), every=1, score="r2")
    run = run_file(shared_path, of.scene, validation=keys)
    assert train(run, comm=comm) == 0
    said = capfd.readouterr().err
    assert said.count("validation after step") == 3
    assert said.count("(validation.score: r2, after step 1: none, since all labels are equal)") == 1
    assert said.count("is never the best") == 1
    assert not (Path(run.output) / "best").exists()
