"""Partitions and micro-batches never change the result, together with ranks and tiles."""

from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI
from test_same_as_whole_image import (
    NETWORKS,
    check_same,
    options_of,
    outcome_of,
    run_file,
    scenes_of,
    wanted_of,
    with_norm,
)

from tilenet.geometry.unet import unet_layers
from tilenet.training.config.keys import MeshKeys, NetworkKeys, TileKeys

pytestmark = pytest.mark.ranks(2)

PIPELINES = {
    "2 partitions": {"partitions": 2, "micro_batches": 2, "checkpointing": "always"},
    "3 partitions": {"partitions": 3, "micro_batches": 4, "checkpointing": "except_last"},
    "4 partitions": {"partitions": 4, "micro_batches": 3, "checkpointing": "never"},
    "checkpointing alone": {"checkpointing": "always"},
    "2 partitions, 1f1b": {"partitions": 2, "micro_batches": 2, "pipeline": "1f1b"},
    "4 partitions, 1f1b": {
        "partitions": 4, "micro_batches": 3, "pipeline": "1f1b", "checkpointing": "always",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["same-nearest", "same-bilinear", "valid"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_tiles_as_micro_batches(
    comm: MPI.Intracomm, shared_path: Path, name: str, pipeline: str
) -> None:
    (scene,) = scenes_of(shared_path, [(157, 211)], comm)
    wanted = wanted_of([scene], NETWORKS[name])
    tiles = TileKeys(rows=3, columns=4)
    run = run_file(shared_path, [scene], NETWORKS[name], tiles=tiles, **PIPELINES[pipeline])
    check_same(comm, outcome_of(run, comm, scene.image, 64), wanted, scene.valid)


@pytest.mark.ranks(2, 4)
def test_sub_tiles_where_tiles_are_fewer_than_micro_batches(
    comm: MPI.Intracomm, shared_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (scene,) = scenes_of(shared_path, [(157, 211)], comm)
    keys = NETWORKS["same-nearest"]
    wanted = wanted_of([scene], keys)
    pipeline = {"partitions": 3, "micro_batches": 5, "checkpointing": "always"}
    run = run_file(shared_path, [scene], keys, **pipeline)
    capfd.readouterr()
    check_same(comm, outcome_of(run, comm, scene.image, None), wanted, scene.valid)
    assert comm.rank or "sub-tiles" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("norm", "more"),
    [
        ("none", {"checkpointing": "except_last"}),
        ("instance", {"checkpointing": "except_last"}),
        ("group", {"pipeline": "1f1b"}),
        ("instance", {"pipeline": "1f1b", "checkpointing": "always"}),
    ],
)
def test_images_as_micro_batches(
    comm: MPI.Intracomm, shared_path: Path, norm: Any, more: dict[str, Any]
) -> None:
    """Statistics over a whole image are exact where a micro-batch is one."""
    sizes = [(60, 77), (41, 120), (97, 33), (56, 56), (64, 31)]
    scenes = scenes_of(shared_path, sizes, comm)
    keys = with_norm(NETWORKS["same-bilinear"], norm)
    wanted = wanted_of(scenes, keys)
    pipeline = {"micro_batches": -(-len(scenes) // comm.size), "partitions": 3}
    mesh = MeshKeys(comm.size, 1, 1)
    run = run_file(shared_path, scenes, keys, mesh=mesh, **pipeline, **more)
    check_same(comm, outcome_of(run, comm, scenes[0].image, None), wanted, scenes[0].valid)


@pytest.mark.ranks(1, 2)
def test_one_layer_per_partition(comm: MPI.Intracomm, shared_path: Path) -> None:
    (scene,) = scenes_of(shared_path, [(97, 130)], comm)
    keys = NetworkKeys(poolings=2, base=4, dropout=0.2, convolutions=1)
    wanted = wanted_of([scene], keys)
    ones = [1] * len(unet_layers(options_of(keys)))
    run = run_file(
        shared_path, [scene], keys, tiles=TileKeys(2, 3), balance=ones, checkpointing="always"
    )
    check_same(comm, outcome_of(run, comm, scene.image, 64), wanted, scene.valid)
