"""A run so small that it can be killed hundreds of times, and what must stand after each life."""

import csv
import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import rasterio
from safetensors.numpy import load_file

from tilenet.errors import TilenetError
from tilenet.storage.checkpoints import FILES, saved_checkpoints
from tilenet.storage.checksums import wrong_file
from tilenet.storage.whole_checkpoint import newest_whole

__all__ = ["Standing", "difference", "is_trained", "make_scene", "map_command", "stands", "wrong"]
__all__ += ["HANG_S", "STEPS", "is_mapped", "train_command"]

STEPS, SAVED_EVERY, VALIDATED_EVERY, KEPT = 40, 4, 6, 2
HANG_S = 8.0
TABLES = "history.csv", "validation.csv", "confusion.csv"
MAP = "map.tif"
# Where there is no room for the report, a run says so and is done. Seconds by rank are those of a
# life's steps: one that was killed after its last step left none to the next.
NOT_ALWAYS = {"report.html", "timings.json"}


def make_scene(folder: Path) -> None:
    """Two images of random pixels, with labels that their first band tells."""
    rng = np.random.default_rng(3)
    grid = {"driver": "GTiff", "crs": "EPSG:32630", "dtype": "uint8"}
    grid["transform"] = rasterio.Affine(2, 0, 5e5, 0, -2, 4e6)
    for name, (height, width) in (("train", (96, 120)), ("held", (64, 72))):
        pixels = rng.integers(1, 200, (2, height, width)).astype(np.uint8)
        for path, values in ((f"{name}.tif", pixels), (f"{name}_labels.tif", pixels[:1] // 70)):
            size = {"count": len(values), "height": height, "width": width}
            with rasterio.open(folder / path, "w", **grid, **size) as file:
                file.write(values)


def train_command(scene: Path, run: Path) -> list[str]:
    """To begin the run, or to go on with it."""
    keys: dict[str, object] = {
        "images": scene / "train.tif",
        "labels": scene / "train_labels.tif",
        "validation.images": scene / "held.tif",
        "validation.labels": scene / "held_labels.tif",
        "validation.every": VALIDATED_EVERY,
        "classes": 3,
        "output": run,
        "network.poolings": 1,
        "network.base": 8,
        "network.convolutions": 1,
        "network.dropout": 0.2,
        "network.norm": "batch",
        "network.norm_scope": "tile",
        "tiles.rows": 2,
        "tiles.columns": 2,
        "precision": "float64",
        "device": "cpu",
        "steps": STEPS,
        "checkpoint_every": SAVED_EVERY,
        "checkpoints.keep": KEPT,
        "hang_seconds": HANG_S,
    }
    given = [f"--{name}={value}" for name, value in keys.items()]
    return [sys.executable, "-m", "tilenet", "train", *given, "--resume"]


def map_command(scene: Path, run: Path) -> list[str]:
    """To begin the run's map, or to go on with it; as job scripts do."""
    paths = [str(run), str(scene / "train.tif"), str(run / MAP)]
    more = ["--tile", "24", "--output", "logits", "--device", "cpu", "--hang-seconds", str(HANG_S)]
    command = [sys.executable, "-m", "tilenet", "predict", *paths, *more]
    return [*command, "--resume", "--overwrite"]


@dataclass(frozen=True)
class Standing:
    """What a run has."""

    rows: int  # the history's last step; 0: there is none
    saved: int  # step of the checkpoint that the run would go on from; 0: it would begin
    tiles: frozenset[str]  # of the map, whose pieces are there
    mapped: bool  # whether the map is in its place


def stands(run: Path) -> Standing:
    """What a run has that no process works on."""
    saved, found = 0, None
    with suppress(TilenetError):  # which `wrong` says
        found = newest_whole(run).checkpoint
    if found is not None:
        saved = int(json.loads((found / "progress.json").read_text())["step"])
    tiles = frozenset(piece.name for piece in run.glob(f".{MAP}.pieces.part/*.raw"))
    steps = _steps(run / TABLES[0])
    return Standing(max(steps, default=0), saved, tiles, (run / MAP).exists())


def _steps(table: Path) -> list[int]:
    """Of the whole rows; a row without its line end was being written."""
    if not table.exists():
        return []
    lines = table.read_text().split("\n")[1:-1]
    return [int(line.split(",")[0]) for line in lines]


def wrong(run: Path) -> list[str]:
    """What must not be, whenever a life ended."""
    said = []
    try:
        going_on = newest_whole(run)
        said += [f"{one.path.name} is broken: {one.wrong}" for one in going_on.broken]
    except TilenetError as error:
        said.append(str(error))
    for one in saved_checkpoints(run):
        fault = wrong_file(one, FILES)
        if fault is not None:
            said.append(f"{one.name} is broken: {fault}")
    steps = _steps(run / TABLES[0])
    if steps != list(range(1, len(steps) + 1)):
        said.append(f"the history has steps {steps}")
    standing = stands(run)
    if standing.rows - standing.saved > SAVED_EVERY:
        said.append(f"of {standing.rows} steps only {standing.saved} are saved")
    if standing.saved > standing.rows:
        said.append(f"{standing.saved} steps are saved, the history knows of {standing.rows}")
    return said


def is_trained(run: Path) -> bool:
    """Whether nothing of the training is left to do."""
    standing = stands(run)
    validated = _steps(run / TABLES[1])
    return standing.rows == standing.saved == STEPS and validated[-1:] == [STEPS]


def is_mapped(run: Path) -> bool:
    """Whether the map is there, and nothing is left next to it."""
    return stands(run).mapped and not any(run.glob(f".{MAP}.*"))


def difference(run: Path, other: Path) -> float | str:
    """How far two finished runs are apart, in the largest value of each tensor, row and map.

    Returns:
        0.0: all numbers are equal, to the last bit. In words: what cannot be compared.
    """
    furthest = 0.0
    for name in TABLES:
        ours, theirs = (_numbers(one / name) for one in (run, other))
        if ours.shape != theirs.shape:
            return f"{name} has {len(ours)} rows of {len(theirs)}"
        furthest = max(furthest, _apart(ours, theirs))
    for link in ("last", "best"):
        if _step_of(run / link) != _step_of(other / link):
            return f"{link} is {_step_of(run / link)}, not {_step_of(other / link)}"
        for file in ("weights.safetensors", "state.safetensors"):
            tensors, wanted = (load_file(one / link / file) for one in (run, other))
            if tensors.keys() != wanted.keys():
                return f"{link}/{file} has other tensors"
            # The number of batches that a norm saw counts a rank's tiles, and is of no use.
            keys = [key for key in wanted if not key.endswith("num_batches_tracked")]
            furthest = max(furthest, *(_apart(tensors[key], wanted[key]) for key in keys))
    with rasterio.open(run / MAP) as file, rasterio.open(other / MAP) as reference:
        furthest = max(furthest, _apart(file.read(), reference.read()))
    names, wanted_names = (
        {path.name for path in one.iterdir()} - NOT_ALWAYS for one in (run, other)
    )
    if names != wanted_names:
        return f"files are left or missing: {sorted(names ^ wanted_names)}"
    kept = [path.name for path in (run / "checkpoints").iterdir()]
    if any(not name.startswith("step-") for name in kept) or len(kept) > KEPT + 1:
        return f"checkpoints are left: {sorted(kept)}"
    return furthest


def _numbers(table: Path) -> np.ndarray:
    """Of a table, what is the same in every run."""
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    own = {"peak_bytes", "peak_host_bytes", "peak_active_bytes"}
    own |= {key for row in rows for key in row if "seconds" in key}
    kept = [[float(row[key] or "nan") for key in row if key not in own] for row in rows]
    return np.array(kept)


def _apart(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest difference, over the largest value; infinite, where only one is not a number."""
    if np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f"):
        return 0.0
    scale = float(np.nanmax(np.abs(theirs))) or 1.0
    both = np.isnan(ours) & np.isnan(theirs)
    apart = np.where(both, 0.0, np.abs(ours - theirs)) / scale
    return float(np.nan_to_num(apart, nan=np.inf).max())


def _step_of(link: Path) -> str:
    return Path(os.path.realpath(link)).name.split(".")[0]
