"""A run small enough to be made again and again, and when two of them are the same."""

import csv
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tilenet.__main__ import main
from tilenet.storage.checkpoints import FILES
from tilenet.storage.checksums import wrong_file

TABLES = "history.csv", "validation.csv", "confusion.csv"


def train(scene: Path, output: Path, *flags: str, **more: object) -> int:
    keys: dict[str, Any] = {
        "images": scene / "train.tif",
        "labels": scene / "train_labels.tif",
        "validation.images": scene / "held.tif",
        "validation.labels": scene / "held_labels.tif",
        "validation.every": 2,
        "classes": 3,
        "output": output,
        "network.poolings": 1,
        "network.base": 4,
        "network.convolutions": 1,
        "network.dropout": 0.2,
        "precision": "float64",
        "device": "cpu",
        "steps": 6,
        "checkpoint_every": 2,
        "checkpoints.keep": 3,
        "hang_seconds": 0,
    }
    given = [f"--{name}={value}" for name, value in (keys | more).items()]
    return main(["train", *given, *flags])


def rows(run: Path, name: str) -> list[dict[str, str]]:
    """Of a table, what is the same in every run."""
    with (run / name).open(newline="") as file:
        found = list(csv.DictReader(file))
    own = {"peak_bytes"} | {key for row in found for key in row if "seconds" in key}
    return [{key: value for key, value in row.items() if key not in own} for row in found]


def assert_same(run: Path, other: Path) -> None:
    """All numbers of two runs to the last bit; and their last and best checkpoints are whole."""
    for name in TABLES:
        assert rows(run, name) == rows(other, name)
        assert rows(run, name)
    for link in ("last", "best"):
        assert wrong_file(run / link, FILES) is None
        assert (run / link).resolve().name.split(".")[0] == (other / link).resolve().name
        for file in ("weights.safetensors", "state.safetensors"):
            found, wanted = (load_file(one / link / file) for one in (run, other))
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], value) for key, value in wanted.items())
