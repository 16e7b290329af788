"""`tilenet check --save`: somebody's weights as a checkpoint, of which maps are made."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from safetensors.torch import load_file, save_file
from zoo import network

from tilenet.__main__ import main

Capture = pytest.CaptureFixture[str]
MEAN, STD = (100.0, 90.0, 120.5), (20.0, 10.0, 40.0)
NUMBERS = ["--mean", *map(str, MEAN), "--std", *map(str, STD)]


def saved(folder: Path, *more: str) -> int:
    return main(["check", "zoo:network", "--options", "name=gated", "--save", str(folder), *more])


def test_its_map_is_the_modules(write_raster: Callable[..., str], tmp_path: Path) -> None:
    """A module with gates, of weights from a file, on an image larger than its tiles."""
    generator = torch.Generator().manual_seed(8)
    module = network("gated")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    given = ["--weights", str(tmp_path / "w.safetensors"), "--classes", "a", "b", "c", *NUMBERS]
    assert saved(tmp_path / "net", *given) == 0
    kept = load_file(tmp_path / "net" / "last" / "weights.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in module.state_dict().items())

    pixels = np.random.default_rng(4).integers(1, 255, (3, 70, 92)).astype(np.uint8)
    image, out = write_raster("image.tif", pixels), tmp_path / "map.tif"
    wanted = [str(tmp_path / "net"), image, str(out), "--output", "logits", "--device", "cpu"]
    assert main(["predict", *wanted, "--precision", "float64", "--tile", "32"]) == 0
    with torch.no_grad(), rasterio.open(out) as file:
        shape = (3, 1, 1)
        x = (pixels - np.reshape(MEAN, shape)) / np.reshape(STD, shape)
        logits = module.double().eval()(torch.from_numpy(x)[None])[0].numpy()
        assert np.abs(file.read() - logits).max() <= 1e-11 * np.abs(logits).max()
        assert file.descriptions == ("a", "b", "c")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--classes", "a", "b"], "classes: 2 of 3"),
        (["--mean", "1"], "mean: 1"),
        (["--std", "1", "0", "2"], "above 0"),
        (["--classes", "a", "b", "c\n"], "must not contain control characters"),
        (["--weights", "nothing.pth"], "nothing.pth: FileNotFoundError"),
    ],
)
def test_what_cannot_be_saved(more: list[str], said: str, tmp_path: Path, capsys: Capture) -> None:
    assert saved(tmp_path / "net", *more) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "net").exists()


def test_a_run_is_not_overwritten(tmp_path: Path, capsys: Capture) -> None:
    assert saved(tmp_path) == 0
    assert saved(tmp_path) == 1
    assert "a run is not overwritten" in capsys.readouterr().err


def test_the_papers_halo_is_of_u_nets(
    write_raster: Callable[..., str], tmp_path: Path, capsys: Capture
) -> None:
    image = write_raster("image.tif", np.ones((3, 40, 40), np.uint8))
    assert saved(tmp_path / "net") == 0
    wanted: list[Any] = [str(tmp_path / "net"), image, str(tmp_path / "map.tif"), "--halo"]
    assert main(["predict", *wanted, "epsilon"]) == 1
    assert "the paper's halo is one of U-Nets" in capsys.readouterr().err
