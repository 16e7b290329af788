"""Other precisions and devices give the same numbers, as far as they can."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
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
    scenes_of,
)
from whole_recipe import train_whole

from tilenet.training.config.keys import GradientKeys, TileKeys

pytestmark = pytest.mark.ranks(1, 2)


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1), ("float16", 0.02)]
)
def test_lower_precision_is_near_float64(
    comm: MPI.Intracomm, shared_path: Path, precision: str, tolerance: float
) -> None:
    (scene,) = scenes_of(shared_path, [(97, 130)], comm)
    keys = NETWORKS["same-nearest"]
    run = run_file(shared_path, [scene], keys, tiles=TileKeys(2, 3))
    wanted = train_whole([scene], options_of(keys), STEPS, LR, SEED)
    found = outcome_of(replace(run, precision=precision), comm, scene.image, 40)
    loss, _, logits = differences(found, wanted, scene.valid)
    assert 0 < loss <= tolerance
    assert 0 < logits <= 10 * tolerance * float(np.abs(wanted.logits).max())


@pytest.mark.parametrize("piece_mb", [0.002, 4.0])
def test_the_size_of_pieces_never_changes_the_result(
    comm: MPI.Intracomm, shared_path: Path, piece_mb: float
) -> None:
    (scene,) = scenes_of(shared_path, [(97, 130)], comm)
    keys = NETWORKS["same-nearest"]
    gradients = GradientKeys("host", piece_mb)
    run = run_file(shared_path, [scene], keys, tiles=TileKeys(2, 3), gradients=gradients)
    wanted = train_whole([scene], options_of(keys), STEPS, LR, SEED)
    loss, weight, _ = differences(outcome_of(run, comm, scene.image, 40), wanted, scene.valid)
    assert loss <= 1e-12
    assert weight <= 1e-10


@pytest.mark.gpu
def test_a_gpu_gives_the_numbers_of_the_whole_image(comm: MPI.Intracomm, shared_path: Path) -> None:
    if torch.cuda.device_count() < comm.size:
        pytest.skip(f"{comm.size} ranks need as many GPUs, torch sees {torch.cuda.device_count()}")
    (scene,) = scenes_of(shared_path, [(97, 130)], comm)
    keys = NETWORKS["same-bilinear"]
    run = run_file(shared_path, [scene], keys, tiles=TileKeys(2, 3))
    wanted = train_whole([scene], options_of(keys), STEPS, LR, SEED)
    found = outcome_of(replace(run, device="cuda"), comm, scene.image, 40)
    loss, weight, _ = differences(found, wanted, scene.valid)
    assert loss <= 1e-12
    assert weight <= 1e-10
