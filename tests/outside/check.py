"""Prove from outside that what tilenet wrote is the mathematics that it claims to be.

Written from docs/checkpoint.md alone: nothing of tilenet is imported, no tile is cut, no rank is
started, and even the weights are read by hand. Each network runs once, on the whole image.

    check.py map CHECKPOINT IMAGE LOGITS.tif [LOGITS.tif ...]
    check.py step CHECKPOINT0 CHECKPOINT1 IMAGE LABELS [--class-weights W W ...] [--seed S]

The exit code is 0 where all is equal, 1 where something differs, 2 for wrong arguments.
"""

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
import torch
from numpy.typing import NDArray
from rasterio.enums import ColorInterp
from rasterio.errors import NotGeoreferencedWarning
from rebuild import Checkpoint, Image, load, whole_image
from torch import Tensor

MAP_TOLERANCE = 1e-12  # of the largest logit, or of 1
STEP_TOLERANCE = 1e-10  # of a tensor's largest gradient


def main(arguments: list[str]) -> int:
    """Run a check; return the exit code."""
    warnings.simplefilter("ignore", NotGeoreferencedWarning)
    given = parser().parse_args(arguments)
    if given.command == "map":
        return check_map(given.checkpoint, given.image, given.logits)
    checkpoints = given.checkpoint0, given.checkpoint1
    return check_step(checkpoints, given.image, given.labels, given.class_weights, given.seed)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(prog="check.py", description=__doc__.partition("\n")[0])
    commands = made.add_subparsers(dest="command", required=True)
    of_map = commands.add_parser("map", help="maps hold the network's logits on the whole image")
    of_map.add_argument("checkpoint", type=Path, help="folder of a checkpoint")
    of_map.add_argument("image")
    of_map.add_argument("logits", nargs="+", help="map made with --output logits")
    of_step = commands.add_parser("step", help="an SGD step with lr 1 is the whole-image gradient")
    of_step.add_argument("checkpoint0", type=Path, help="made with --steps 0")
    of_step.add_argument(
        "checkpoint1", type=Path, help="made with --steps 1 --optimizer.name sgd --optimizer.lr 1"
    )
    of_step.add_argument("image")
    of_step.add_argument("labels")
    of_step.add_argument("--class-weights", type=float, nargs="+", metavar="W")
    of_step.add_argument("--seed", type=int, default=0)
    return made


def check_map(checkpoint: Path, image_path: str, map_paths: list[str]) -> int:
    """Compare maps with the network's logits on the whole image."""
    found = load(checkpoint)
    image = read_image(image_path, found.network)
    with torch.inference_mode():
        logits = whole_image(found, image).numpy()
    scale = max(1.0, float(abs(logits[:, image.valid]).max(initial=0)))
    code = 0
    for path in map_paths:
        with rasterio.open(image_path) as like, rasterio.open(path) as file:
            written = file.read()
            same_place = file.transform == like.transform and file.crs == like.crs
        if written.shape != logits.shape:
            raise SystemExit(f"{path} has shape {written.shape}, not {logits.shape}")
        nan_where_due = bool((np.isnan(written) == ~image.valid).all())
        differences = abs(written - logits)[:, image.valid]
        # NaN compares false, so a map with too many of them is never good.
        worst = float(differences.max(initial=0))
        good = worst <= MAP_TOLERANCE * scale and nan_where_due and same_place
        code = code if good else 1
        print(
            f"{path}: largest difference {worst:.3g} (largest logit {scale:.3g}, "
            f"{differences.size} values), NaN exactly where invalid: {nan_where_due}, "
            f"transform and CRS of the image: {same_place}: {'equal' if good else 'DIFFERENT'}"
        )
    return code


def check_step(
    checkpoints: tuple[Path, Path],
    image_path: str,
    labels_path: str,
    class_weights: list[float] | None,
    seed: int,
) -> int:
    """Compare w₀ − w₁ with the whole-image gradient, and the statistics with the image's."""
    before, after = load(checkpoints[0]), load(checkpoints[1])
    if before.network != after.network:
        raise SystemExit("the checkpoints' network.json differ, so they are not of one run")
    image = read_image(image_path, before.network)
    gradients = whole_gradient(before, image, labels_path, class_weights, seed)
    off = statistics_off(before.network["statistics"], image)
    print(f"statistics: off by {off:.3g}: {'equal' if off <= MAP_TOLERANCE else 'DIFFERENT'}")
    code = 0 if off <= MAP_TOLERANCE else 1
    worst, worst_name = 0.0, "none"
    for name, gradient in gradients.items():
        difference = float((before.tensors[name] - after.tensors[name] - gradient).abs().max())
        largest = float(gradient.abs().max())
        # w₁ was rounded when it was stored: nobody can get closer than that.
        rounding = float(after.tensors[name].abs().max()) * 2.0**-52
        if not difference <= STEP_TOLERANCE * largest + rounding:  # not: NaN must fail
            print(f"{name}: difference {difference:.3g}, largest gradient {largest:.3g}: DIFFERENT")
            code = 1
        if largest > 0 and not difference / largest <= worst:
            worst, worst_name = difference / largest, name
    print(
        f"gradient of {len(gradients)} tensors: largest relative difference {worst:.3g} "
        f"({worst_name}): {'DIFFERENT' if code else 'equal'}"
    )
    return code


def whole_gradient(
    checkpoint: Checkpoint,
    image: Image,
    labels_path: str,
    class_weights: list[float] | None,
    seed: int,
) -> dict[str, Tensor]:
    """Gradient of Σ w·ℓ / Σ w over the labelled valid pixels, for all that is trained."""
    network = checkpoint.network
    num_classes = len(network["classes"])
    labels = read_labels(labels_path, network["ignore_index"], image)
    trained = {
        name: tensor.clone().requires_grad_()
        for name, tensor in checkpoint.tensors.items()
        if name.endswith((".weight", ".bias"))
    }
    logits = whole_image(Checkpoint(network, checkpoint.tensors | trained), image, seed)
    counted = torch.from_numpy(labels != network["ignore_index"])
    chosen = torch.from_numpy(labels)[counted]
    per_class = torch.tensor(class_weights or [1.0] * num_classes, dtype=torch.float64)
    if len(per_class) != num_classes or not len(chosen):
        raise SystemExit(
            f"one weight per class and at least one labelled pixel are needed (weights: "
            f"{len(per_class)}, classes: {num_classes}, pixels: {len(chosen)})"
        )
    log_shares = logits[:, counted].log_softmax(dim=0)
    losses = -log_shares.gather(0, chosen[None])[0]
    weights = per_class[chosen]
    loss = (weights * losses).sum() / weights.sum()
    print(f"loss {float(loss.detach()):.17g} over {len(chosen)} pixels")
    found = torch.autograd.grad(loss, list(trained.values()))
    return dict(zip(trained, found, strict=True))


def statistics_off(statistics: dict[str, list[float]], image: Image) -> float:
    """By how much the checkpoint's mean and std are off those of the image's valid pixels."""
    values = image.pixels[:, image.valid]
    mean, std = values.mean(axis=1), values.std(axis=1)
    off = abs(mean - statistics["mean"]), abs(std - statistics["std"])
    return float((np.maximum(*off) / np.maximum(abs(mean), std)).max())


# Files


def read_image(path: str, network: dict[str, Any]) -> Image:
    """Read a whole image, the bands that the network reads."""
    with rasterio.open(path) as file:
        values = file.read(network["bands"])
        mask = file.dataset_mask()
    nodata = network["nodata"]
    if nodata is None:
        valid = mask != 0
    elif nodata == "none":
        valid = np.ones(mask.shape, np.bool_)
    elif nodata == "collar":
        valid = ~from_the_edge(~values.any(axis=0))
    else:
        valid = (values != nodata).any(axis=0)
    pixels = values.astype(np.float64)
    return Image(pixels, valid & np.isfinite(pixels).all(axis=0))


def from_the_edge(black: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Black pixels that reach the image's edge over sides of black pixels."""
    grown = np.ones((black.shape[0] + 2, black.shape[1] + 2), np.bool_)  # a halo, all reached
    inside: NDArray[np.bool_] = grown[1:-1, 1:-1]
    inside[:] = False
    before = -1
    while before != (before := int(inside.sum())):
        near = grown[:-2, 1:-1] | grown[2:, 1:-1] | grown[1:-1, :-2] | grown[1:-1, 2:]
        inside[:] = black & (inside | near)
    return inside


def read_labels(path: str, ignore_index: int, image: Image) -> NDArray[np.int64]:
    """Read whole labels, (H, W); `ignore_index` where they or the image have no data."""
    with rasterio.open(path) as file:
        if file.count != 1 or file.colorinterp[0] == ColorInterp.alpha:
            raise SystemExit(f"{path} must have one band")
        values, mask = file.read(1), file.dataset_mask()
    if values.shape != image.valid.shape:
        raise SystemExit(f"{path} must have the image's size")
    labels: NDArray[np.int64] = np.where(
        (mask != 0) & image.valid, values.astype(np.int64), ignore_index
    )
    return labels


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
