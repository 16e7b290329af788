"""Crops drawn by class are the same on any number of ranks, and so is what is learned from them."""

from dataclasses import replace
from pathlib import Path

import pytest
from left_by_runs import alone, check_close
from mpi4py import MPI
from test_same_as_whole_image import NETWORKS, run_file, scenes_of

from tilenet.library.whole_run import train
from tilenet.training.config.keys import AugmentKeys, MeshKeys
from tilenet.training.images import run_data as module


@pytest.mark.ranks(2, 4)
def test_oversampled_runs_are_those_of_one_rank(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = (0.9, 0.0995, 0.0005)
    scenes = scenes_of(shared_path, [(157, 121), (64, 90)], comm, shares=shares)
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
    wanted = alone(run, comm, mesh=MeshKeys())
    if comm.rank == 0:
        ours, theirs = drawn
        steps = [ours.samples(step) for step in range(50)]
        assert steps == [theirs.samples(step) for step in range(50)]
        plain = replace(theirs, oversample=0.0)
        assert [plain.samples(step) for step in range(50)] != steps
    assert len(set(comm.allgather(repr([drawn[0].samples(step) for step in range(50)])))) == 1
    check_close(run, wanted)
