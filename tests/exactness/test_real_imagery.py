"""Real images over two ranks: what one huge device would give, computed without tilenet."""

from pathlib import Path

import pytest
from mpi4py import MPI
from outside.real_images import CASES, arguments, check_logits, check_losses, image_name

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
        check_losses(real, name, run / "checkpoints" / "step-00000000", run)
        check_logits(real, name, run, path)
