"""The examples in docstrings of the names at the top run, on files of the names that they have."""

import inspect
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pyogrio
import pytest
import rasterio
import shapely
import torch
import torch.nn.functional as F
from torch import nn

import tilenet

SIZE = 96, 128
NAMES = ["train", "predict", "evaluate", "halo", "plan", "Run", "Job", "swapping"]


def examples(text: str) -> list[str]:
    """The indented parts of a docstring that use tilenet."""
    parts: list[list[str]] = [[]]
    text = inspect.cleandoc(text).partition("Args:")[0]
    for line in text.splitlines():
        if line.startswith("    ") or (not line and parts[-1]):
            parts[-1].append(line)
        elif parts[-1]:
            parts.append([])
    codes = [textwrap.dedent("\n".join(part)) for part in parts]
    return [code for code in codes if "tilenet." in code]


def write_files(folder: Path, size: tuple[int, int]) -> None:
    """scene.tif and roads.gpkg."""
    grid: dict[str, Any] = {"driver": "GTiff", "height": size[0], "width": size[1], "count": 4}
    grid |= {"crs": "EPSG:32630", "transform": rasterio.Affine(2, 0, 5e5, 0, -2, 4e6)}
    pixels = np.random.default_rng(5).integers(1, 900, (4, *size)).astype(np.uint16)
    with rasterio.open(folder / "scene.tif", "w", dtype="uint16", **grid) as file:
        file.write(pixels)
    road = np.array([shapely.box(500010, 3999850, 500100, 3999990)])
    more = {"geometry_type": "Polygon", "crs": "EPSG:32630"}
    pyogrio.raw.write(
        folder / "roads.gpkg", shapely.to_wkb(road), [np.array(["road"])], ["kind"], **more
    )


@pytest.mark.parametrize("name", ["", *NAMES])
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, (1024, 1024) if name == "plan" else SIZE)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 2, 1))
    array = np.random.default_rng(6).normal(size=(4, *SIZE))
    names = {"tilenet": tilenet, "torch": torch, "F": F, "net": net, "model": net, "array": array}
    names |= {"criterion": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD(net.parameters())}
    names["batches"] = [(torch.rand(1, 4, 9, 9), torch.zeros(1, 9, 9, dtype=torch.long))]
    names["run"] = run = tilenet.Run("run")
    found = examples((tilenet if not name else getattr(tilenet, name)).__doc__ or "")
    assert found
    if name in ("predict", "evaluate", "Run"):
        keys: dict[str, Any] = {"images": "scene.tif", "labels": "roads.gpkg", "classes": 2}
        tilenet.train(net, output="run", steps=1, validation={"share": 0.3, "block_px": 32}, **keys)
        if name == "evaluate":
            tilenet.predict(run, "scene.tif", "map.tif")
    for code in found:
        exec(code, names)
