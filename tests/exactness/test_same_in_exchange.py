"""Whole runs with exchange, norms over whole images and Dice: the numbers of the whole image."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI
from shared_out import grids
from test_same_as_whole_image import (
    check_same,
    outcome_of,
    run_file,
    scenes_of,
    wanted_of,
    with_norm,
)
from whole_image import Scene

from tilenet.training.config.keys import MeshKeys, NetworkKeys, TileKeys

pytestmark = pytest.mark.ranks(2, (3, 4))

KEYS = NetworkKeys(poolings=2, base=6, dropout=0.2)
LOSSES = ("ce", "dice", "ce+dice")
NORMS = ("none", "instance", "group", "batch")
MODES = ("overlap", "exchange")


def check(
    comm: MPI.Intracomm,
    folder: Path,
    scenes: list[Scene],
    keys: NetworkKeys,
    loss: str = "ce",
    **more: Any,
) -> None:
    wanted = wanted_of(scenes, keys, loss)
    assert abs(wanted.losses[-1] - wanted.losses[0]) > 1e-3, "steps must matter"
    run = run_file(folder, scenes, keys, loss=loss, **more)
    found = outcome_of(run, comm, scenes[0].image, None)
    check_same(comm, found, wanted, scenes[0].valid, logits=1e-11)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("mode", MODES)
def test_one_image(comm: MPI.Intracomm, shared_path: Path, norm: Any, mode: str) -> None:
    """Over 2 ranks each norm and each mode on each grid, but not both modes of a norm on one."""
    scenes = scenes_of(shared_path, [(97, 131)], comm)
    ways = grids(comm.size)
    rows, columns = ways[(NORMS.index(norm) + MODES.index(mode)) % len(ways)]
    mesh = MeshKeys(1, rows, columns)
    check(comm, shared_path, scenes, with_norm(KEYS, norm), halo_mode=mode, mesh=mesh)


@pytest.mark.parametrize("loss", LOSSES[1:])
@pytest.mark.parametrize("mode", ["overlap", "exchange"])
def test_dice_of_whole_images(comm: MPI.Intracomm, shared_path: Path, loss: str, mode: str) -> None:
    """Two images of different sizes; where the number of ranks is even, on two replicas."""
    scenes = scenes_of(shared_path, [(97, 131), (64, 90)], comm)
    replicas = 2 - comm.size % 2
    rows, columns = grids(comm.size // replicas)[0]
    mesh = MeshKeys(replicas, rows, columns)
    more = {"halo_mode": mode, "mesh": mesh, "micro_batches": 2 // replicas}
    check(comm, shared_path, scenes, KEYS, loss, **more)


@pytest.mark.ranks(2, 4)
def test_dice_of_tiles_in_a_pipeline(comm: MPI.Intracomm, shared_path: Path) -> None:
    """More tiles than ranks, and ranks without any."""
    scenes = scenes_of(shared_path, [(97, 131), (24, 20)], comm)
    mesh = MeshKeys(1, 1, comm.size)
    tiles = TileKeys(rows=2, columns=5)
    check(
        comm, shared_path, scenes, KEYS, "ce+dice", mesh=mesh, tiles=tiles,
        micro_batches=4 * -(-5 // comm.size), partitions=2, checkpointing="always",
    )  # fmt: skip


@pytest.mark.parametrize("norm", ["none", "instance"])
def test_images_as_micro_batches_in_exchange(
    comm: MPI.Intracomm, shared_path: Path, norm: Any
) -> None:
    scenes = scenes_of(shared_path, [(60, 77), (41, 120), (97, 43)], comm)
    pipeline = {"micro_batches": 3, "partitions": 3, "checkpointing": "except_last"}
    mesh = {"halo_mode": "exchange", "mesh": MeshKeys(1, *grids(comm.size)[0])}
    check(comm, shared_path, scenes, with_norm(KEYS, norm), "ce+dice", **mesh, **pipeline)


@pytest.mark.ranks(2, 4)
@pytest.mark.usefixtures("not_on_one_gpu")
@pytest.mark.parametrize(
    ("norm", "mode", "partitions", "more"),
    [
        ("none", "exchange", 2, {}),
        ("group", "exchange", 3, {"checkpointing": "always"}),
        ("instance", "overlap", 2, {"tiles": TileKeys(rows=3, columns=5)}),
    ],
)
def test_images_that_flow(
    comm: MPI.Intracomm,
    shared_path: Path,
    norm: Any,
    mode: str,
    partitions: int,
    more: dict[str, Any],
) -> None:
    """On 4 ranks two replicas have 2 images and 1, and of 3 × 5 tiles one rank has more."""
    scenes = scenes_of(shared_path, [(60, 77), (41, 120), (97, 43)], comm)
    mesh = MeshKeys(comm.size // 2, 1, 2)
    check(
        comm, shared_path, scenes, with_norm(KEYS, norm), halo_mode=mode, mesh=mesh,
        partitions=partitions, micro_batches=2, pipeline="1f1b", **more,
    )  # fmt: skip


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_tiles_of_an_image_stacked_in_one_batch(
    comm: MPI.Intracomm, shared_path: Path, norm: Any
) -> None:
    """Statistics over the image with more tiles than ranks."""
    scenes = scenes_of(shared_path, [(97, 131), (98, 130)], comm)
    more = {"mesh": MeshKeys(1, 1, comm.size), "tiles": TileKeys(rows=2, columns=7)}
    check(comm, shared_path, scenes, with_norm(KEYS, norm), **more)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_halos_travel_in_half_the_bits(
    comm: MPI.Intracomm, shared_path: Path, precision: Any
) -> None:
    """Autocast makes halos of dtypes that numpy knows, and of one that it does not."""
    scenes = scenes_of(shared_path, [(97, 131)], comm)
    keys = replace(KEYS, norm="instance")
    wanted = wanted_of(scenes, keys)
    run = run_file(shared_path, scenes, keys, halo_mode="exchange")
    found = outcome_of(replace(run, precision=precision), comm, scenes[0].image, None)
    apart = max(abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True))
    # 8 bits of mantissa: exact it is not, which shows that the run was in that precision.
    assert 1e-7 < comm.allreduce(apart, op=MPI.MAX) < 2e-2
