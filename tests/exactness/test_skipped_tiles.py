"""Tiles without labels are not read, and no bit of the result tells."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from left_by_runs import check_close, rows, same_tensors, weights
from mpi4py import MPI
from test_same_as_whole_image import NETWORKS, run_file
from whole_image import IGNORE, random_scene

from tilenet.data.rasters.raster import Raster
from tilenet.library.whole_run import train
from tilenet.parallel.sums import gradients
from tilenet.training.config.keys import AugmentKeys, TileKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.images import workload as module

TURNED = AugmentKeys(flips=True, rotations=True)
# What is learned from lies in a corner of the first image; nothing of the second is labelled.
SIZES = (96, 96), (77, 61)


def sparse_run(comm: MPI.Intracomm, folder: Path, **more: Any) -> RunFile:
    scenes = [
        random_scene(folder, size, seed, write=comm.rank == 0)
        for seed, size in enumerate(SIZES, start=1)
    ]
    if comm.rank == 0:
        for number, scene in enumerate(scenes):
            sparse = np.full(scene.classes.shape, IGNORE, np.uint8)
            if number == 0:
                sparse[37:55, 3:44] = scene.classes[37:55, 3:44]
            with rasterio.open(scene.labels, "r+") as file:
                file.write(sparse, 1)
    comm.Barrier()
    network = more.pop("network", NETWORKS["same-bilinear"])
    return run_file(folder, scenes, network, tiles=TileKeys(3, 3), **more)


CASES: dict[str, dict[str, Any]] = {
    "as they are": {},
    "turned": {"augment": replace(TURNED, noise=0.1)},
    "an image a step": {"batch_size": 1, "steps": 4},
    "epsilon": {"halo": "epsilon"},
    "valid": {"network": NETWORKS["valid"], "augment": TURNED},
    "crops": {"crop_px": 48, "augment": TURNED, "batch_size": 3},
    "dice": {"loss": "ce+dice", "micro_batches": 18},
}


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("case", CASES)
def test_tiles_without_labels_change_no_bit(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    more = CASES[case]
    run = replace(sparse_run(comm, shared_path), **more)
    found, num_reads = read_and_trained(comm, run, monkeypatch)
    monkeypatch.setattr(module, "holds_labels", lambda *rest: True)
    everything = replace(run, output=str(shared_path / "everything"))
    wanted, all_reads = read_and_trained(comm, everything, monkeypatch)
    assert found == wanted
    assert same_tensors(weights(run), weights(everything))
    assert num_reads < all_reads - 8


def read_and_trained(
    comm: MPI.Intracomm, run: RunFile, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[str, str]], int]:
    """Losses and weights of the steps, as they are written, and windows that all ranks read."""
    count, original = [0], Raster.read

    def counted(self: Raster, *rest: Any) -> Any:
        count[0] += 1
        return original(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Raster, "read", counted)
        assert train(run, comm=comm) == 0
    return [(row["loss"], row["weight_sum"]) for row in rows(run)], comm.allreduce(count[0])


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b"])
def test_micro_batches_are_of_tiles_with_labels(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch, pipeline: str
) -> None:
    """Others form mini-batches than before, so sums are rounded elsewhere.

    Some ranks have no tiles, and sums that are made while backward runs do not wait for theirs.
    """
    monkeypatch.setattr(gradients, "sums_pay_meanwhile", lambda *_, **__: True)
    run = sparse_run(comm, shared_path, partitions=2, micro_batches=3, pipeline=pipeline)
    run = replace(run, hang_seconds=20)
    assert train(run, comm=comm) == 0
    monkeypatch.setattr(module, "holds_labels", lambda *rest: True)
    everything = replace(run, output=str(shared_path / "everything"))
    assert train(everything, comm=comm) == 0
    check_close(run, everything)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mode", ["exchange", "norm"])
def test_ranks_that_need_each_other_read_all_tiles(
    comm: MPI.Intracomm, shared_path: Path, mode: str
) -> None:
    """Else they would wait for those that have nothing to read."""
    run = sparse_run(comm, shared_path)
    run = replace(run, tiles=TileKeys(), augment=TURNED)
    if mode == "exchange":
        run = replace(run, halo_mode="exchange")
    else:
        run = replace(run, network=replace(run.network, norm="instance"))
    alone = replace(run, output=str(shared_path / "alone"))
    assert train(run, comm=comm) == 0
    if comm.rank == 0:
        assert train(alone, comm=MPI.COMM_SELF) == 0
    comm.Barrier()
    for ours, theirs in zip(rows(run), rows(alone), strict=True):
        assert abs(float(ours["loss"]) - float(theirs["loss"])) <= 1e-12


@pytest.mark.ranks(1, 2)
def test_an_image_without_labels_is_named_once(
    comm: MPI.Intracomm, shared_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = replace(sparse_run(comm, shared_path), batch_size=1, steps=4)
    assert train(run, comm=comm) == 0
    said = "".join(comm.allgather(capfd.readouterr().err))
    assert said.count("image2.tif is labelled, so nothing is learned there") == 1
    # Its steps change nothing, and the others go on.
    counted = [float(row["weight_sum"]) > 0 for row in rows(run)]
    assert counted.count(True) == counted.count(False) == 2
