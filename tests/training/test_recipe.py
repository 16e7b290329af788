"""The recipe in docs/ is a run file that runs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from left_by_runs import losses

from tilenet.__main__ import main
from tilenet.training.config.keys import AugmentKeys, OptimizerKeys, ScheduleKeys
from tilenet.training.config.read import read_run_file

RECIPE = Path(__file__).resolve().parents[2] / "docs" / "gscnn.yaml"


def test_it_says_what_the_article_says() -> None:
    run, _ = read_run_file(["-c", str(RECIPE)])
    assert run.optimizer == OptimizerKeys("sgd", 0.01, momentum=0.9, weight_decay=1e-4)
    assert run.schedule == ScheduleKeys("poly", power=1.0)
    assert run.augment == AugmentKeys(flips=True, brightness=0.25, contrast=0.25)
    assert (run.crop_px, run.batch_size, run.epochs) == (720, 16, 175)
    assert (run.network.norm, run.loss, len(run.class_names)) == ("batch", "ce", 19)
    # every: None is each epoch
    held_out = run.validation.holds_out, run.validation.every, run.validation.batch_size
    assert held_out == (True, None, 2)
    assert run.validation.score == "mean_iou"
    rates = run.schedule.rates(run.optimizer.lr, 1750)
    assert [rates.at(step) for step in (0, 700, 1749)] == pytest.approx(
        [0.01, 0.01 * 0.6, 0.01 / 1750]
    )


def test_it_starts(write_raster: Callable[..., str], tmp_path: Path) -> None:
    """On small scenes, with a small network and small crops."""
    rng = np.random.default_rng(1)
    files = {}
    for part in ("", "validation."):
        classes = np.kron(rng.integers(0, 3, (8, 10)), np.ones((16, 16), int)).astype(np.uint8)
        light = rng.normal(120, 30, (3, 3))[:, classes] + rng.normal(0, 5, (3, *classes.shape))
        pixels = light.clip(0, 255).astype(np.uint8)
        files[f"{part}images"] = write_raster(f"{part}image.tif", pixels)
        files[f"{part}labels"] = write_raster(f"{part}labels.tif", classes)
    options = files | {
        "output": tmp_path / "run",
        "network.poolings": 2,
        "network.base": 4,
        "crop_px": 64,
        "epochs": "null",
        "steps": 2,
        "device": "cpu",
    }
    given = [f"--{name}={value}" for name, value in options.items()]
    assert main(["train", "-c", str(RECIPE), *given]) == 0
    found = losses(tmp_path / "run")
    assert len({*found}) == len(found) == 2
    assert all(0 < loss < 2 * np.log(19) for loss in found)
