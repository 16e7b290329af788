"""All that a run can ask for at once, on images of several sizes: as on the whole images.

Turns, light, noise, dropout, norms over images or over the step, cross-entropy and Dice, balanced
classes, clipping, momentum, poly with a warm-up, pixels without data, labels or polygons.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI
from test_same_as_whole_image import check_same, options_of, outcome_of, with_common_statistics
from test_same_recipe import EVERYTHING, KEYS, POLY, SGD, a_run, scenes_of
from test_vector_training import KEYS as POLYGONS
from test_vector_training import drawn_scene
from whole_image import Scene
from whole_recipe import train_recipe

from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.training.config.keys import MeshKeys

pytestmark = pytest.mark.ranks(2, 4)

# No multiples of anything, and so large against the halo, 12 px, that no tile reads all.
SIZES = [(61, 83), (66, 58)]
NETWORK = replace(KEYS, convolutions=1)
POLYGONS_OF = {"rasters": VectorKeys(), "polygons": POLYGONS}
# Between the smallest and the largest norm of a step's gradient, so that some are clipped.
CLIP = {
    ("instance", "rasters"): 0.25,
    ("instance", "polygons"): 0.4,
    ("batch", "rasters"): 0.4,
    ("batch", "polygons"): 0.9,
}
CROP, BATCH = {"instance": None, "batch": 56}, {"instance": 2, "batch": 4}
# Both for both modes: where one takes the first with rasters, it takes the last with polygons.
MESHES = {2: [(2, 1, 1), (1, 1, 2)], 4: [(2, 1, 2), (1, 2, 2)]}


def drawn_scenes(folder: Path, comm: MPI.Intracomm) -> list[Scene]:
    """Scenes with polygons in degrees that share their statistics."""
    scenes = [
        drawn_scene(folder, size, write=comm.rank == 0, seed=seed)
        for seed, size in enumerate(SIZES, start=1)
    ]
    comm.Barrier()
    return with_common_statistics(scenes)


# Each norm and each kind of labels over 2 and over 4 ranks.
@pytest.mark.parametrize(
    ("norm", "labels"),
    [
        pytest.param("instance", "rasters", marks=pytest.mark.ranks(2)),
        pytest.param("instance", "polygons", marks=pytest.mark.ranks(4)),
        pytest.param("batch", "rasters", marks=pytest.mark.ranks(4)),
        pytest.param("batch", "polygons", marks=pytest.mark.ranks(2)),
    ],
)
def test_everything_at_once(comm: MPI.Intracomm, shared_path: Path, norm: Any, labels: str) -> None:
    """Batch norm takes crops, since it takes a step's images in one batch, of one size."""
    if labels == "polygons":
        scenes = drawn_scenes(shared_path, comm)
    else:
        scenes = scenes_of(shared_path, SIZES, comm)
    keys = replace(NETWORK, norm=norm)
    clipped = replace(SGD, clip_norm=CLIP[norm, labels])
    run = a_run(
        shared_path, scenes, keys, loss="ce+dice", vectors=POLYGONS_OF[labels], optimizer=clipped,
        crop_px=CROP[norm], batch_size=BATCH[norm],
    )  # fmt: skip
    assert (run.augment, run.schedule, run.class_weights) == (EVERYTHING, POLY, "auto")
    wanted = comm.bcast(train_recipe(run, scenes, options_of(keys)) if comm.rank == 0 else None)
    assert abs(wanted.losses[-1] - wanted.losses[0]) > 1e-3, "steps must matter"
    ways = MESHES[comm.size]
    for number, mode in enumerate(("overlap", "exchange")):
        mesh = MeshKeys(*ways[(number + (labels == "rasters")) % len(ways)])
        at_once = 1 if norm == "batch" else 2 // (mesh.replicas or 1)
        change: dict[str, Any] = {"halo_mode": mode, "micro_batches": at_once}
        found = outcome_of(replace(run, mesh=mesh, **change), comm, scenes[0].image, None)
        check_same(comm, found, wanted, scenes[0].valid)
