"""A network that left tilenet gives what `tilenet predict` gives, from the same pixel values."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attending import network
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

import tilenet
from tilenet.__main__ import main
from tilenet.errors import TilenetError
from tilenet.export import program
from tilenet.export.pixels import FromPixels
from tilenet.export.tile import decide_tile
from tilenet.geometry.halo import Context
from tilenet.geometry.layers import Conv
from tilenet.geometry.opaque import Opaque
from tilenet.model.inputs import standardise
from tilenet.storage.network_json import NetworkRecord

Run = Callable[[str], Path]
CONTEXT = Context(4, 0, 22, 23, 24, valid=False)


def loaded(path: Path) -> nn.Module:
    module: nn.Module = torch.export.load(path).module()
    return module


def as_images(pixels: NDArray[Any]) -> Tensor:
    return torch.from_numpy(pixels.astype(np.float64))[None]


@pytest.mark.parametrize(
    ("way", "output"),
    [("unet", "logits"), ("instance", "probabilities"), ("own", "logits"), ("pooled", "logits")],
)
def test_an_exported_network_gives_what_a_map_holds(
    run: Run, pixels: NDArray[Any], tmp_path: Path, way: str, output: str
) -> None:
    out = tmp_path / "net.pt2"
    assert main(["export", str(run(way)), str(out), "--output", output]) == 0
    wanted = tilenet.predict(run(way), pixels, output=output, tile_px=48)
    found = loaded(out)(as_images(pixels))[0].numpy()
    assert np.ptp(wanted) > 0.01
    assert np.abs(found - wanted).max() < 1e-12
    smaller = as_images(pixels[:, 8:104, 16:64])
    both = loaded(out)(torch.cat([smaller, smaller.flip(1)]))  # other sizes, several images
    whole = tilenet.predict(run(way), pixels[::-1, 8:104, 16:64], output=output)
    assert np.abs(both[1].numpy() - whole).max() < 1e-12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.json", "net.pt2"]


def test_an_unpadded_network_gives_what_is_left_of_its_input(
    run: Run, pixels: NDArray[Any], tmp_path: Path
) -> None:
    out = tmp_path / "net.pt2"
    assert main(["export", str(run("unpadded")), str(out)]) == 0
    found = loaded(out)(as_images(pixels))[0].numpy()
    wanted = tilenet.predict(run("unpadded"), pixels, output="logits")[:, 8:-8, 8:-8]
    assert np.abs(found - wanted).max() < 1e-12


@pytest.mark.parametrize(
    ("way", "least"), [("unet", 8), ("unpadded", 18), ("instance", 4), ("narrow", 8)]
)
def test_the_least_size_is_said(
    run: Run, pixels: NDArray[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    way: str, least: int,
) -> None:  # fmt: skip
    out = tmp_path / "net.pt2"
    assert main(["export", str(run(way)), str(out)]) == 0
    found = re.search(
        r"sizes from (\d+) px on that are multiples of (\d+) px,", capsys.readouterr().err
    )
    assert found
    assert int(found[1]) == least
    net = loaded(out)
    assert net(as_images(pixels[:, :least, 40 : 40 + least])).numel() > 0
    less = least - int(found[2])
    with pytest.raises(RuntimeError, match=f">= {least}"):
        net(as_images(pixels[:, :less, :less]))


def test_a_module_of_windows_is_exported_with_its_code(
    run: Run, pixels: NDArray[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, folder = tmp_path / "net.pt2", run("windows")
    assert main(["export", str(folder), str(out)]) == 1
    assert "holds weights, not the module's code" in capsys.readouterr().err
    code = ["--network", "attending:network", "--options", "window_px=24"]
    assert main(["export", str(folder), str(out), *code]) == 0
    assert "are blended where they overlap" in capsys.readouterr().err
    window = np.concatenate([pixels, pixels])[:3, 30:54, 40:64]
    found = loaded(out)(as_images(window))[0].numpy()
    wanted = tilenet.predict(folder, window, output="logits", module=network(24))
    assert np.abs(found - wanted).max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pixels_are_standardised_to_the_bit(dtype: torch.dtype) -> None:
    values = np.random.default_rng(1).normal(3e6, 5, (3, 20, 30))
    mean, std = (3e6 + 0.123, 3e6 - 0.4567, 3e6), (5.1, 0.3, 0.0)
    record = NetworkRecord(
        (Conv(3, 2),), (1, 2, 3), ("a", "b"), 255, mean, std, None, None, "float32", 0
    )
    pixels = torch.from_numpy(values).to(dtype)
    wanted = standardise(pixels.numpy(), np.ones((20, 30), bool), mean, std, dtype)
    found = FromPixels(nn.Identity(), record, dtype, softmax=False)(pixels[None])
    assert torch.equal(found, wanted)


def test_where_torch_leaves_no_size_open_the_file_takes_one(
    run: Run, pixels: NDArray[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    record = program._recorded

    def refuse(*arguments: Any) -> Any:
        if arguments[-1] is not None:
            raise ValueError("sizes")
        return record(*arguments)

    monkeypatch.setattr(program, "_recorded", refuse)
    out = tmp_path / "net.pt2"
    assert main(["export", str(run("own")), str(out), "--tile", "96"]) == 0
    assert "takes pixel values of 96 × 96 px" in capsys.readouterr().err
    window = pixels[:, :96, :96]
    found = loaded(out)(as_images(window))[0].numpy()
    assert np.abs(found - tilenet.predict(run("own"), window, output="logits")).max() < 1e-12

    monkeypatch.setattr(program, "_recorded", lambda *_: 1 / 0)
    assert main(["export", str(run("own")), str(out), "--overwrite"]) == 1
    assert "takes all of its operators (ZeroDivisionError: division by zero)" in (
        capsys.readouterr().err
    )


def test_what_cannot_be_written_is_said(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "net.pt2"
    out.write_text("mine")
    folder = str(run("own"))
    for arguments, code, said in [
        ([folder, str(out)], 1, "is not overwritten unasked"),
        ([folder, str(tmp_path / "net.tif")], 1, "give it one of these endings"),
        ([folder, str(tmp_path / "nowhere" / "net.pt2")], 1, "needs an existing directory"),
        ([str(tmp_path), str(tmp_path / "b.pt2")], 1, "a checkpoint is a folder with"),
        ([folder, str(out), "--overwrite", "--tile", "97"], 1, "multiple of the network's align"),
        ([folder, str(tmp_path / "b.pt2"), "--options", "a=1"], 2, "goes with --network"),
    ]:
        assert main(["export", *arguments]) == code
        assert said in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["net.pt2"]


# --- windows


@settings(max_examples=60)
@given(st.integers(0, 6), st.integers(0, 70), st.integers(0, 7))
def test_windows_overlap_by_their_halos_and_begin_on_the_grid(
    power: int, halos: int, odd: int
) -> None:
    alignment = 1 << power
    valid = odd > 0
    halo_px = halos * alignment + odd * valid
    context = Context(alignment, 0, halo_px, halo_px, halo_px, valid=valid)
    tile = decide_tile(context, None, None)
    overlap_px = tile.px * tile.overlap_percent // 100
    assert overlap_px >= 2 * halo_px
    assert tile.overlap_percent <= 50 or valid
    assert (tile.px - 2 * halo_px) % alignment == 0
    assert tile.on_grid == ((tile.px - overlap_px) % alignment == 0)
    assert tile.on_grid or valid
    assert decide_tile(context, None, tile.px) == tile


def test_windows_of_a_size_that_does_not_fit_are_refused() -> None:
    for px in (0, -4, 48, 102):
        with pytest.raises(TilenetError, match=r"alignment: 4 px, halo: 24 px"):
            decide_tile(CONTEXT, None, px)
    with pytest.raises(TilenetError, match="multiple of the network's alignment and 2,"):
        decide_tile(replace(CONTEXT, halo_px=23, valid=True), None, 100)
    layer = Opaque(2, 3, 24, "a:b")
    assert decide_tile(CONTEXT, layer, None).px == 24
    with pytest.raises(TilenetError, match="windows of one size"):
        decide_tile(CONTEXT, layer, 48)


def test_a_full_disk_is_said(
    run: Run, small_disk: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Torch ends the process where it writes by itself."""
    out = small_disk(16) / "net.pt2"
    assert main(["export", str(run("own")), str(out)]) == 1
    assert "must be written to a place that can be written" in capsys.readouterr().err
    assert os.listdir(out.parent) == []
