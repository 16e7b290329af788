"""Whole commands with broken input: one line, exit 1 or 2, nothing left behind."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.storage.network_json import NetworkRecord

LEAST = "images: a.tif\nlabels: b.tif\nclasses: 2\noutput: out\nsteps: 1\n"
LAYERS = unet_layers(UNetOptions(poolings=1, base=2, bands=1, classes=2, norm="batch"))
RECORD = NetworkRecord(LAYERS, (1,), ("a", "b"), 255, (0.5,), (2.0,), None, None, "float32", 5)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["train", "-c", "broken.yaml"], 2),
        (["predict", "checkpoint", "image.tif", "map.tif"], 1),
        (["evaluate", "broken.yaml", "image.tif"], 1),
    ],
    ids=lambda value: value[0] + value[-1] if isinstance(value, list) else None,
)
def test_a_command_says_one_line(
    tmp_path: Path, write_raster: Callable[..., str], arguments: list[str], code: int
) -> None:
    (tmp_path / "broken.yaml").write_text(LEAST + "bands: [1, {")
    write_raster("image.tif", np.arange(4096, dtype="uint8").reshape(64, 64))
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "weights.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    entry = RECORD.to_json()
    wide = unet_layers(UNetOptions(poolings=1, base=2**18, bands=1, classes=2))
    entry["layers"] = [{"kind": one.kind, **vars(one)} for one in wide]
    (tmp_path / "checkpoint" / "network.json").write_text(json.dumps(entry))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    command = [sys.executable, "-m", "tilenet", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("tilenet")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
