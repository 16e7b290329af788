"""Real images over two ranks: what one huge device would give, computed without tilenet."""

from pathlib import Path

import numpy as np
import pytest
import rasterio
import torch
from mpi4py import MPI
from outside.real_images import (
    CASES,
    arguments,
    image_name,
    plain_losses,
    read_checkpoint,
    read_image,
    read_labels,
    read_losses,
)
from outside.rebuild import whole_image

from tilenet.__main__ import main

pytestmark = [pytest.mark.real, pytest.mark.ranks(2)]


@pytest.mark.parametrize(
    ("name", "options", "of_map"),
    [
        ("new_brunswick", "--mesh.rows 2 --mesh.columns 1", "--tile 120"),
        ("custom_proj", "--halo_mode exchange", ""),
        ("SN7", "--tiles.rows 3 --tiles.columns 2", ""),
    ],
)
def test_losses_and_logits_are_those_of_the_whole_image(
    comm: MPI.Intracomm, real: Path, shared_path: Path, name: str, options: str, of_map: str
) -> None:
    case, run, path = CASES[name], shared_path / "run", shared_path / "map.tif"
    given = [*arguments(real, name, run), *options.split()]
    assert main([*given, "--steps", "0"]) == 0
    assert main([*given, "--steps", "2", "--resume"]) == 0
    files = image_name(real, case.files)
    logits = ["predict", str(run), files, str(path), "--output", "logits", *of_map.split()]
    assert main(logits) == 0
    if comm.rank == 0:
        image, grid = read_image(real, case.files, case.bands, case.factor)
        labels = read_labels(real, case, grid)
        first = read_checkpoint(run / "checkpoints" / "step-00000000")
        losses = plain_losses(first, image, labels, balanced=case.balanced)
        assert np.abs(np.subtract(read_losses(run), losses)).max() <= 1e-12
        with torch.inference_mode():
            wanted = whole_image(read_checkpoint(run / "last"), image).numpy()
        with rasterio.open(path) as file, rasterio.open(real / case.files[0]) as source:
            assert (file.transform, file.crs) == (source.transform, source.crs)
            apart = np.abs(file.read() - wanted)
        assert np.array_equal(np.isnan(apart), np.broadcast_to(~image.valid, apart.shape))
        assert apart[:, image.valid].max() <= 1e-12 * max(1.0, float(np.abs(wanted).max()))
