"""What does a loop of one's own cost beside `tilenet.train`, which makes the same steps?

One module, one scene (1536², 4 bands; quick: 384²), crops of 512 px (quick: 128), two a step, on
one rank and on two, both halo modes: seconds of CPU from the end of the first step to that of the
last, in turns, each in a job of its own; the fastest of each. The losses must be the same bits.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import tilenet
from bench.report import Claim, Found, at_most, on_ranks
from bench.scenes import write_pair

WAYS = "train", "loop"
MODES = "overlap", "exchange"


def module() -> nn.Module:
    """Convolutions in 24 channels, of three classes; looks 5 px around."""
    torch.manual_seed(1)
    layers = [nn.Conv2d(4, 24, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(24, 24, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(24, 3, 3, padding=1))


def steps_of(way: str, mode: Any, folder: str, crop_px: int, steps: int) -> dict[str, Any]:
    """Losses of a run on these ranks, and rank 0's seconds of CPU of the steps but the first."""
    losses: list[float] = []
    clock: list[float] = []
    keys: dict[str, Any] = {"crop_px": crop_px, "batch_size": 2, "steps": steps, "device": "cpu"}
    files = f"{folder}/image.tif", f"{folder}/image_labels.tif"

    def done(loss: float) -> None:
        losses.append(loss)
        clock.append(time.process_time())

    if way == "train":
        tilenet.train(
            module(), images=files[0], labels=files[1], classes=3, output=f"{folder}/run",
            overwrite=True, halo_mode=mode, checkpoint_every=10**6, prove=False,
            optimizer={"name": "sgd", "lr": 1e-3},
            on_step=lambda row: done(row["loss"] or 0.0), **keys,
        )  # fmt: skip
    else:
        job = tilenet.Job()
        local = job.split(module(), halo_mode=mode)
        optimizer = torch.optim.SGD(local.parameters(), 1e-3, fused=True)
        for step in job.steps(*files, prove=False, **keys):
            for tile in step:
                logits = local(tile.image)[tile.own]
                each = F.cross_entropy(logits, tile.labels, ignore_index=255, reduction="none")
                step.add(each.sum(dtype=torch.float64), (tile.labels != 255).sum())
            done(step.apply(optimizer))
    return {"losses": losses, "seconds": clock[-1] - clock[0]} if clock else {}


def bench(quick: bool, times: int = 3) -> Found:
    """Run both ways in turns."""
    side, crop_px, steps = (384, 128, 4) if quick else (1536, 512, 12)
    figures: dict[str, Any] = {"side": side, "crop_px": crop_px, "steps": steps}
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory() as folder:
        write_pair(Path(folder), (4, side, side), 3)
        for ranks in (1, 2):
            for mode in MODES:
                found: dict[str, list[Any]] = {way: [] for way in WAYS}
                for _ in range(1 if quick else times):
                    for way in WAYS:
                        work = way, mode, folder, crop_px, steps
                        found[way].append(on_ranks(ranks, steps_of, *work))
                seconds = {way: min(one["seconds"] for one in found[way]) for way in WAYS}
                case = f"{ranks} ranks, {mode}"
                figures[case] = {**seconds, "losses": found["loop"][0]["losses"]}
                other = sum(one["losses"] != found["train"][0]["losses"] for one in found["loop"])
                claims += [
                    at_most(f"{case}: loops with another loss", other, 0),
                    at_most(
                        f"{case}: CPU time, of a run's", seconds["loop"] / seconds["train"], 1.02
                    ),
                ]
    return figures, claims
