"""Crops drawn by class are the same on any number of ranks, and so is what is learned from them."""

from dataclasses import replace
from pathlib import Path

import pytest
from mpi4py import MPI
from test_resume import rows, weights
from test_same_as_whole_image import NETWORKS, run_file
from whole_image import random_scene

from tilenet.train import train
from tilenet.training.config.keys import AugmentKeys, MeshKeys
from tilenet.training.images import workload as module


@pytest.mark.ranks(2, 4)
def test_oversampled_runs_are_those_of_one_rank(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenes = [
        random_scene(shared_path, size, seed, write=comm.rank == 0, shares=(0.9, 0.0995, 0.0005))
        for seed, size in enumerate([(157, 121), (64, 90)], start=1)
    ]
    comm.Barrier()
    drawn = []
    original = module.CropSchedule

    def kept(*rest: object) -> object:
        drawn.append(original(*rest))  # type: ignore[arg-type]
        return drawn[-1]

    monkeypatch.setattr(module, "CropSchedule", kept)
    run = run_file(
        shared_path, scenes, NETWORKS["same-bilinear"], mesh=MeshKeys(replicas=comm.size)
    )
    crops = {"crop_px": 32, "batch_size": 5, "augment": AugmentKeys(flips=True)}
    run = replace(run, oversample=0.6, **crops)
    assert train(run, comm=comm) == 0
    alone = replace(run, output=str(shared_path / "alone"), mesh=MeshKeys())
    if comm.rank == 0:
        assert train(alone, comm=MPI.COMM_SELF) == 0
        ours, theirs = drawn
        steps = [ours.samples(step) for step in range(50)]
        assert steps == [theirs.samples(step) for step in range(50)]
        plain = replace(theirs, oversample=0.0)
        assert [plain.samples(step) for step in range(50)] != steps
    comm.Barrier()
    assert len(set(comm.allgather(repr([drawn[0].samples(step) for step in range(50)])))) == 1
    for mine, one in zip(rows(run), rows(alone), strict=True):
        assert abs(float(mine["loss"]) - float(one["loss"])) <= 1e-12
    trained = weights(run)
    for name, tensor in weights(alone).items():
        assert float((trained[name] - tensor).abs().max() / tensor.abs().max()) <= 1e-10
