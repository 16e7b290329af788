"""Partitions and micro-batches never change the result, together with ranks and tiles."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from test_same_as_whole_image import (
    LR,
    NETWORKS,
    SEED,
    STEPS,
    differences,
    options_of,
    outcome_of,
    run_file,
    scaled,
)
from whole_image import random_scene, train_whole

from tilenet.geometry.unet import unet_layers
from tilenet.training.config.keys import MeshKeys, NetworkKeys, TileKeys

pytestmark = pytest.mark.ranks(1, 2, 4)

PIPELINES = {
    "2 partitions": {"partitions": 2, "micro_batches": 2, "checkpointing": "always"},
    "3 partitions": {"partitions": 3, "micro_batches": 4, "checkpointing": "except_last"},
    "4 partitions": {"partitions": 4, "micro_batches": 3, "checkpointing": "never"},
    "checkpointing alone": {"checkpointing": "always"},
}


def close(found: Any, wanted: Any, valid: np.ndarray[Any, Any]) -> None:
    loss, weight, logits = differences(found, wanted, valid)
    assert loss <= 1e-12
    assert weight <= 1e-10
    assert logits <= 1e-12 * max(1.0, float(np.abs(wanted.logits).max()))


@pytest.mark.parametrize("name", ["same-nearest", "same-bilinear", "valid"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_tiles_as_micro_batches(
    comm: MPI.Intracomm, shared_path: Path, name: str, pipeline: str
) -> None:
    scene = random_scene(shared_path, (157, 211), 1, write=comm.rank == 0)
    comm.Barrier()
    wanted = train_whole([scene], options_of(NETWORKS[name]), STEPS, LR, SEED)
    run = run_file(
        shared_path,
        [scene],
        NETWORKS[name],
        tiles=TileKeys(rows=3, columns=4),
        **PIPELINES[pipeline],
    )
    close(outcome_of(run, comm, scene.image, 64), wanted, scene.valid)


def test_sub_tiles_where_tiles_are_fewer_than_micro_batches(
    comm: MPI.Intracomm, shared_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scene = random_scene(shared_path, (157, 211), 1, write=comm.rank == 0)
    comm.Barrier()
    keys = NETWORKS["same-nearest"]
    wanted = train_whole([scene], options_of(keys), STEPS, LR, SEED)
    pipeline = {"partitions": 3, "micro_batches": 5, "checkpointing": "always"}
    run = run_file(shared_path, [scene], keys, **pipeline)
    capfd.readouterr()
    close(outcome_of(run, comm, scene.image, None), wanted, scene.valid)
    assert comm.rank or "sub-tiles" in capfd.readouterr().err


@pytest.mark.parametrize("norm", ["none", "instance", "group"])
def test_images_as_micro_batches(comm: MPI.Intracomm, shared_path: Path, norm: Any) -> None:
    """Statistics over a whole image are exact where a micro-batch is one."""
    scenes = [
        random_scene(shared_path, size, seed, write=comm.rank == 0)
        for seed, size in enumerate([(60, 77), (41, 120), (97, 33), (56, 56), (64, 31)], start=1)
    ]
    comm.Barrier()
    keys = replace(NETWORKS["same-bilinear"], norm=norm, groups=2)
    pixels = np.concatenate([s.pixels[:, s.valid] for s in scenes], axis=1).astype(np.float64)
    mean, std = pixels.mean(axis=1), pixels.std(axis=1)
    scenes = [scaled(scene, mean, std) for scene in scenes]
    wanted = train_whole(scenes, options_of(keys), STEPS, LR, SEED)
    run = run_file(
        shared_path,
        scenes,
        keys,
        mesh=MeshKeys(comm.size, 1, 1),
        micro_batches=-(-len(scenes) // comm.size),
        partitions=3,
        checkpointing="except_last",
    )
    close(outcome_of(run, comm, scenes[0].image, None), wanted, scenes[0].valid)


def test_one_layer_per_partition(comm: MPI.Intracomm, shared_path: Path) -> None:
    scene = random_scene(shared_path, (97, 130), 1, write=comm.rank == 0)
    comm.Barrier()
    keys = NetworkKeys(poolings=2, base=4, dropout=0.2, convolutions=1)
    wanted = train_whole([scene], options_of(keys), STEPS, LR, SEED)
    ones = [1] * len(unet_layers(options_of(keys)))
    run = run_file(
        shared_path, [scene], keys, tiles=TileKeys(2, 3), balance=ones, checkpointing="always"
    )
    close(outcome_of(run, comm, scene.image, 64), wanted, scene.valid)
