"""Runs with validation, and what their scores are to be."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
import torch.nn.functional as F
from left_by_runs import rows
from mpi4py import MPI
from test_same_as_whole_image import run_file
from whole_image import IGNORE, Scene, random_scene

import tilenet.library.whole_run
import tilenet.mapping.choose
import tilenet.mapping.scoring_sinks
from tilenet.mapping.evaluate import confusion_matrix
from tilenet.mapping.predict import predict
from tilenet.mapping.prediction import Prediction
from tilenet.scores import scores
from tilenet.training.config.keys import NetworkKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.config.validation_keys import ValidationKeys
from tilenet.training.scoring import Validation

NETWORK = NetworkKeys(poolings=2, convolutions=1, base=4, dropout=0.2)
LAYERS = 24
SHAPES = [(53, 91), (39, 42)]
SCORE = Validation.score
WEIGHTS = [0.5, 2.0, 1.25]


def held_out(comm: MPI.Intracomm, folder: Path) -> list[Scene]:
    """Images that training does not see; in the second, class 2 does not occur."""
    shares = [(0.2, 0.3, 0.5), (0.6, 0.4, 0.0)]
    places = [folder / "held0", folder / "held1"]
    if comm.rank == 0:
        for place in places:
            place.mkdir()
    comm.Barrier()
    scenes = [
        random_scene(place, size, 7, write=comm.rank == 0, shares=share)
        for place, size, share in zip(places, SHAPES, shares, strict=True)
    ]
    comm.Barrier()
    return scenes


def a_run(
    comm: MPI.Intracomm,
    folder: Path,
    network: NetworkKeys = NETWORK,
    held: list[Scene] | None = None,
    **more: Any,
) -> tuple[RunFile, list[Scene]]:
    scene = random_scene(folder, (61, 90), 1, write=comm.rank == 0)
    held = held_out(comm, folder) if held is None else held
    comm.Barrier()
    keys = ValidationKeys(
        images=[str(one.image) for one in held],
        labels=[str(one.labels) for one in held],
        every=1,
    )
    run = run_file(folder, [scene], network)
    given = {"steps": 2, "validation": keys, "checkpoint_every": 1, "class_weights": WEIGHTS}
    return replace(run, **{**given, **more}), held


def table(run: RunFile, name: str = "validation.csv") -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows(run, name)]


def small_tiles(monkeypatch: pytest.MonkeyPatch, num_bytes: int = 1 << 20) -> None:
    """So that images have several tiles, and with few bytes norms of images several passes."""
    monkeypatch.setattr(tilenet.mapping.choose, "CPU_BYTES", num_bytes)
    monkeypatch.setattr(tilenet.mapping.choose, "CPU_TILE_PX", 32)


def wanted_row(checkpoint: Path, held: list[Scene], comm: MPI.Intracomm) -> dict[str, Any]:
    """What `tilenet predict` and `tilenet evaluate` find of a checkpoint."""
    total, losses, weight = np.zeros((3, 4), np.int64), 0.0, 0.0
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    for scene in held:
        out = checkpoint.parent / "map.tif"
        asked = Prediction(str(checkpoint), str(scene.image), str(out), overwrite=True)
        predict(asked, comm)
        found = confusion_matrix(str(out), str(scene.labels), IGNORE)
        size = len(found)
        total[:size, :size] += found[:, :size]
        total[:size, 3] += found[:, size]
        comm.Barrier()
        predict(replace(asked, output="logits"), comm)
        with rasterio.open(out) as file:
            logits = torch.from_numpy(file.read())[None]
        target = torch.from_numpy(np.where(scene.valid, scene.classes, IGNORE))[None]
        loss = F.cross_entropy(logits, target, weights, ignore_index=IGNORE, reduction="sum")
        losses += float(loss)
        weight += float(weights[target[target != IGNORE]].sum())
        comm.Barrier()
    return scores(total) | {"loss": losses / weight}


def check_row(row: dict[str, str], wanted: dict[str, Any]) -> None:
    assert abs(float(row["loss"]) - wanted["loss"]) <= 1e-12
    for name in ("accuracy", "mean_iou", "mean_f1", "num_pixels"):
        assert float(row[name]) == wanted[name]
    for number in range(3):
        for name in ("iou", "f1"):
            value = wanted[name][number]
            assert row[f"{name}_{number}"] == ("" if value is None else f"{value:.17g}")


def scripted(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Validations that find these accuracies, whatever the network."""
    left = list(values)

    def score(self: Validation, network: Any) -> Any:
        hits = round(left.pop(0) * 100)
        matrix = np.array([[hits, 100 - hits, 0, 3], [0, 0, 0, 0], [0, 0, 0, 0]])
        return replace(SCORE(self, network), scores=scores(matrix), loss=1 - hits / 100)

    monkeypatch.setattr(Validation, "score", score)


def kept(run: RunFile) -> tuple[str, str, list[str]]:
    folder = Path(run.output)
    names = (os.readlink(folder / name).rpartition("/")[2] for name in ("best", "last"))
    return (*names, sorted(os.listdir(folder / "checkpoints")))
