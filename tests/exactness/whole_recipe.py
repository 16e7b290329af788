"""The reference: a plain loop over whole images or crops, altered in memory as the recipe says.

As in whole_image.py: it shares with tilenet the network's modules and first weights, keyed random
numbers, and where crops lie. Turns, radiometry, losses, weights, clipping and rates are written
again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import pi
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from whole_image import IGNORE, Outcome, Scene, dice_of, extended, run_whole, standardised

from tilenet.data.crop_places import crop_places
from tilenet.data.schedule import CropSchedule
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.model.network import build_network
from tilenet.random_keys import key, sixteen_bits, uniform
from tilenet.training.config.keys import AugmentKeys, OptimizerKeys
from tilenet.training.config.run_file import RunFile

Array = np.ndarray[Any, np.dtype[np.float64]]
NORMAL = np.vectorize(NormalDist().inv_cdf, otypes=[np.float64])


@dataclass(frozen=True)
class Altered:
    """What the network sees as one image: pixels (bands, H, W), labels (H, W) and its number."""

    number: int
    pixels: Array
    labels: np.ndarray[Any, np.dtype[np.int64]]


def turned(array: Any, augment: AugmentKeys, seed: int, step: int, number: int) -> Any:
    """An array (…, H, W) as the step sees it."""
    drawn = key(seed, "symmetry", step, number)
    if augment.rotations and not augment.flips:
        return np.rot90(array, drawn % 4, axes=(-2, -1))
    if augment.flips:
        place = drawn % (8 if augment.rotations else 4)
        array = np.swapaxes(array, -2, -1) if place >= 4 else array
        array = np.flip(array, -2) if place // 2 % 2 else array
        array = np.flip(array, -1) if place % 2 else array
    return array


def altered(pixels: Array, augment: AugmentKeys, seed: int, step: int, number: int) -> Array:
    """A turned image in other light, with noise, (bands, H, W)."""
    bands, height, width = pixels.shape
    drawn = 2 * uniform(2 * bands, seed, step, number, "radiometry") - 1
    found = np.empty_like(pixels)
    for band in range(bands):
        gain = 1 + augment.contrast * drawn[band]
        found[band] = gain * pixels[band] + augment.brightness * drawn[bands + band]
    if augment.noise:
        for row in range(height):
            bits = sixteen_bits(width * bands, seed, step, number, "noise", row)
            noise = NORMAL((bits + 0.5) / 2**16)
            found[:, row] += augment.noise * noise.reshape(width, bands).T
    return found


def samples_of(run: RunFile, scenes: list[Scene], unit: int) -> Callable[[int], list[Altered]]:
    """What each step sees."""
    labels = [np.where(scene.valid, scene.classes, IGNORE) for scene in scenes]
    seed, augment = run.seed, run.augment

    def one(step: int, number: int, image: int, rows: slice, cols: slice) -> Altered:
        cut = standardised(scenes[image])[:, rows, cols]
        valid = scenes[image].valid[rows, cols]
        light = altered(turned(cut, augment, seed, step, number), augment, seed, step, number)
        shown = np.where(turned(valid, augment, seed, step, number), light, 0.0)
        own = turned(labels[image][rows, cols], augment, seed, step, number)
        return Altered(number, shown, np.ascontiguousarray(own))

    if run.crop_px is None:
        every = slice(None)
        return lambda step: [one(step, i, i, every, every) for i in range(len(scenes))]
    places = []
    for image in labels:
        edges = [(0, -size % unit) for size in image.shape]
        counted = np.pad(image != IGNORE, edges)
        blocks = counted.reshape(counted.shape[0] // unit, unit, -1, unit)
        cells = np.asarray(blocks.any(axis=(1, 3)))
        places.append(crop_places(cells[None].view(np.uint8), run.crop_px, unit))
    sizes = tuple((image.shape[0], image.shape[1]) for image in labels)
    schedule = CropSchedule(seed, run.batch_size, run.crop_px, sizes, tuple(places))

    def crops(step: int) -> list[Altered]:
        found = []
        for sample in schedule.samples(step):
            at = sample.region
            rows, cols = slice(at.row, at.row + at.height), slice(at.col, at.col + at.width)
            found.append(one(step, sample.number, sample.image, rows, cols))
        return found

    return crops


def rate(run: RunFile, step: int) -> float:
    """The rate of a step from 0, of a run whose length is given in steps."""
    keys, lr, steps = run.schedule, run.optimizer.lr, run.steps or 0
    rising = keys.warmup_steps
    if step < rising:
        return float(np.linspace(0, lr, rising + 2)[1 + step])
    left = (steps - step) / (steps - rising)
    if keys.name == "poly":
        return float(keys.min_lr + (lr - keys.min_lr) * left**keys.power)
    if keys.name == "cosine":
        return float(lr - (lr - keys.min_lr) * np.sin(pi / 2 * (1 - left)) ** 2)
    for milestone in keys.milestones or ():
        lr = lr * keys.factor if step >= milestone else lr
    return lr


def train_whole(
    scenes: list[Scene], options: UNetOptions, steps: int, lr: float, seed: int, loss: str = "ce"
) -> Outcome:
    """Train on whole images, as they are, with plain SGD; map the first one."""
    keys: dict[str, Any] = {"precision": "float64", "seed": seed, "steps": steps, "loss": loss}
    keys["optimizer"] = OptimizerKeys("sgd", lr)
    return train_recipe(RunFile("", options.classes, "", "", **keys), scenes, options)


def train_recipe(run: RunFile, scenes: list[Scene], options: UNetOptions) -> Outcome:
    """Train as the run file says; map the first image."""
    network = build_network(unet_layers(options), run.seed, getattr(torch, run.precision))
    keys = run.optimizer
    optimizer: torch.optim.Optimizer
    if keys.name == "sgd":
        optimizer = torch.optim.SGD(
            network.parameters(), 1.0, momentum=keys.momentum, nesterov=keys.nesterov
        )
    else:
        optimizer = torch.optim.AdamW(network.parameters(), 1.0, weight_decay=keys.weight_decay)
    weight = torch.ones(options.classes, dtype=torch.float64)
    if run.class_weights == "auto":
        every = np.concatenate([scene.classes[scene.valid] for scene in scenes])
        counts = np.bincount(every[every != IGNORE], minlength=options.classes)
        weight = torch.from_numpy(1 / counts)
        weight /= (weight * torch.from_numpy(counts)).sum() / counts.sum()
    look = samples_of(run, scenes, 2**options.poolings)
    losses, norms = [], []
    for step in range(run.steps or 0):
        network.train()
        optimizer.zero_grad()
        network.mask_key.step = step
        samples = look(step)
        logits = _logits(network, samples, options)
        total, divisor = torch.zeros((), dtype=torch.float64), 0.0
        dice = torch.zeros((), dtype=torch.float64)
        for sample, output in zip(samples, logits, strict=True):
            target = torch.from_numpy(sample.labels)
            counted = target != IGNORE
            right = output.log_softmax(0)[:, counted].gather(0, target[counted][None])[0]
            each = -right
            if run.loss == "focal":
                each = (1 - right.exp()) ** run.focal_gamma * each
            total = total + (weight[target[counted]] * each).sum()
            divisor += float(weight[target[counted]].sum())
            dice = dice + dice_of(output, sample.labels) / len(samples)
        mean = dice if run.loss == "dice" else total / divisor
        mean = mean + dice if run.loss == "ce+dice" else mean
        mean.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        norms.append(float(torch.cat([g.flatten() for g in gradients]).norm()))
        for gradient in gradients:
            if keys.clip_norm is not None and norms[-1] > keys.clip_norm:
                gradient *= keys.clip_norm / norms[-1]
        optimizer.param_groups[0]["lr"] = rate(run, step)
        optimizer.step()
        losses.append(float(mean.detach()))
    if keys.clip_norm is not None:
        assert min(norms) < keys.clip_norm < max(norms), norms
    network.eval()
    with torch.no_grad():
        final = run_whole(network, scenes[0], options)[0].numpy()
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    return Outcome(losses, weights, final)


def _logits(network: Any, samples: list[Altered], options: UNetOptions) -> list[torch.Tensor]:
    """Of each sample, (classes, H, W); with batch norm all samples at once."""
    at_once = len(samples) if options.norm == "batch" else 1
    dtype = next(network.parameters()).dtype
    found: list[torch.Tensor] = []
    for first in range(0, len(samples), at_once):
        some = samples[first : first + at_once]
        network.mask_key.images = tuple(sample.number for sample in some)
        inputs = torch.cat([extended(sample.pixels, options) for sample in some])
        outputs = network(inputs.to(dtype))
        for sample, output in zip(some, outputs, strict=True):
            height, width = sample.labels.shape
            found.append(output[:, :height, :width])
    return found
