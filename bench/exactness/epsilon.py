"""What does the paper's own tiling cost in accuracy, and what does it save?

The network of the paper's small model with fewer channels and without normalisation (poolings 5,
halo ε = 92 px by the paper's table, 192 px exact) is trained on the demo's scene in four tiles,
once with `halo: exact` and once with `halo: epsilon`. The first then maps it with the exact halo,
with ε, whose tiles start anywhere on the pooling grid, and with 96 px, as narrow but aligned.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import rasterio

from bench.report import ROOT, Claim, Found, at_least, at_most, mpiexec
from bench.scenes import history, train
from tilenet.mapping.evaluate import confusion_matrix
from tilenet.scores import scores

RANKS, CLASSES = 2, 5


def trained(scene: Path, halo: str, steps: int) -> Path:
    """Train on the whole scene, cut into 2 × 2 tiles."""
    network = {"preset": "small", "base": 8, "norm": "none", "bias": "true"}
    keys = {"images": scene / "scene.tif", "labels": scene / "labels_train.tif", "halo": halo}
    keys |= {"classes": CLASSES, "tiles.rows": 2, "tiles.columns": 2, "device": "cpu"}
    keys |= {f"network.{key}": value for key, value in network.items()}
    return train(RANKS, {**keys, "steps": steps, "optimizer.lr": 2e-3, "output": scene / halo})


def logits(scene: Path, run: Path, halo: str, tile_px: int) -> tuple[Any, float]:
    """The scene's logits and the work ratio, with a halo."""
    out = str(scene / "logits.tif")
    image = str(scene / "scene.tif")
    more = ("--halo", halo, "--tile", str(tile_px), "--output", "logits", "--overwrite", "--json")
    said = mpiexec(RANKS, "-m", "tilenet", "predict", str(run), image, out, *more)
    with rasterio.open(out) as file:
        return file.read(), float(json.loads(said.splitlines()[-1])["work_ratio"])


def mean_iou(scene: Path, values: Any) -> float:
    """Mean IoU of logits on the part that no network was trained on."""
    with rasterio.open(scene / "scene.tif") as file:
        grid = {"transform": file.transform, "crs": file.crs, "nodata": 255}
    profile = {"driver": "GTiff", "height": values.shape[1], "width": values.shape[2], "count": 1}
    with rasterio.open(scene / "map.tif", "w", dtype="uint8", **grid, **profile) as file:
        valid = ~np.isnan(values).any(axis=0)
        file.write(np.where(valid, np.nan_to_num(values).argmax(axis=0), 255).astype(np.uint8), 1)
    matrix = confusion_matrix(str(scene / "map.tif"), str(scene / "labels_test.tif"), 255)
    return float(scores(matrix)["mean_iou"])


def bench(quick: bool) -> Found:
    """Train and map both ways."""
    size, steps = (768, 3) if quick else (1024, 60)
    with tempfile.TemporaryDirectory() as name:
        scene = Path(name)
        make = [sys.executable, "demo/make_scene.py", str(scene), "--size", str(size)]
        subprocess.run(make, check=True, cwd=ROOT, capture_output=True)
        runs = {halo: trained(scene, halo, steps) for halo in ("exact", "epsilon")}
        # one network, mapped with both halos, and whole
        whole, _ = logits(scene, runs["exact"], "exact", size)
        exact, exact_work = logits(scene, runs["exact"], "exact", size // 4)
        near, near_work = logits(scene, runs["exact"], "epsilon", size // 4)
        aligned, aligned_work = logits(scene, runs["exact"], "96", size // 4)
        other, _ = logits(scene, runs["epsilon"], "epsilon", size // 4)
        valid = ~np.isnan(whole).any(axis=0)
        spread = float(whole[:, valid].std())
        maps = {"exact": exact, "epsilon": near, "aligned": aligned}
        differences = {n: np.abs(m - whole)[:, valid] / spread for n, m in maps.items()}
        changed = {
            n: float((m.argmax(axis=0) != whole.argmax(axis=0))[valid].mean())
            for n, m in maps.items()
        }
        pairs = zip(*(history(runs[h], "loss")[0] for h in ("exact", "epsilon")), strict=True)
        loss_differences = [abs(a - b) / a for a, b in pairs]
        figures: dict[str, Any] = {
            "size": size,
            "steps": steps,
            "work_ratio": {"exact": exact_work, "epsilon": near_work, "aligned": aligned_work},
            "largest_difference": {n: float(d.max()) for n, d in differences.items()},
            "mean_difference": {n: float(d.mean()) for n, d in differences.items()},
            "changed_pixels": changed,
            "loss_relative": {"first": loss_differences[0], "largest": max(loss_differences)},
            "mean_iou": {
                **{f"trained exact, mapped {n}": mean_iou(scene, m) for n, m in maps.items()},
                "trained and mapped epsilon": mean_iou(scene, other),
            },
        }
    largest = figures["largest_difference"]
    claims: list[Claim] = [
        at_most("exact tiles differ from the whole image by (float32)", largest["exact"], 1e-4),
        at_least("ε tiles differ by, in spreads of the logits", largest["epsilon"], 1e-4),
        at_most("work of ε over work of exact", near_work / exact_work, 1.0),
    ]
    return figures, claims
