"""The demo on a large scene: seconds and memory of each command, over those of bare torch.

Makes the demo's scene, trains on it and maps it on 2 ranks of one thread, as `SIZE=10000 RANKS=2
make demo` does. Beside it stand two floors (`end_to_end_floor.py`): the same layers on crops and
tiles of the same sizes in bare torch on as many processes, on pixels in memory and forever the
same; as torch is, and with malloc set to keep large buffers, as tilenet sets it. The two take turns
after the commands, and what they take is the mean of their turns: training's seconds are the sum
of what its steps took while the machine was quicker and slower, not of the least. What is above the
floors is start, statistics of the scene, reading, sums over ranks, writing, the report. --quick
trains 40 steps on a scene of 1024².
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.report import ROOT, Claim, Found, at_most, environment, on_ranks
from bench.scenes import history

RANKS = 2
CROP_PX, BATCH = 128, 8  # demo/run.yaml
FLOOR_STEPS, FLOOR_TILES, ROUNDS = 60, 4, 5
FLOORS = {"bare torch": 0, "bare torch that keeps buffers": 1}


def run(*command: str) -> dict[str, Any]:
    """Run a command of the demo: seconds, CPU seconds and the peak of its largest process."""
    with tempfile.TemporaryFile("w+") as printed:
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=printed)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
        printed.seek(0)
        said = printed.read()
    return {
        "seconds": seconds,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_bytes": used.ru_maxrss * 1024,
        "said": said,
    }


def demo(folder: Path, size: int, steps: int) -> dict[str, dict[str, Any]]:
    """The demo's commands, by name."""
    ranks, python = ["mpiexec", "-n", str(RANKS), sys.executable], sys.executable
    scene, trained = str(folder / "scene.tif"), str(folder / "run")
    found = {"scene": run(python, "demo/make_scene.py", str(folder), "--size", str(size))}
    keys = {"images": scene, "labels": folder / "labels_train.tif", "output": trained}
    keys |= {"steps": str(steps)}
    options = [f"--{name}={value}" for name, value in keys.items()]
    found["train"] = run(*ranks, "-m", "tilenet", "train", "-c", "demo/run.yaml", *options)
    arguments = [trained, scene, str(folder / "map.tif"), "--json"]
    found["predict"] = run(*ranks, "-m", "tilenet", "predict", *arguments)
    test = [str(folder / "map.tif"), str(folder / "labels_test.tif")]
    found["evaluate"] = run(python, "-m", "tilenet", "evaluate", *test)
    return found


def shares(folder: Path, train: dict[str, Any]) -> dict[str, float]:
    """Of training's seconds: of its steps what reads and sums, and what is no step."""
    names = ("seconds", "read_seconds", "reduce_seconds")
    total: float = train["seconds"]
    in_steps = dict(zip(names, map(sum, history(folder / "run", *names)), strict=True))
    return {
        "steps": in_steps["seconds"] / total,
        "reading": in_steps["read_seconds"] / total,
        "sums over ranks": in_steps["reduce_seconds"] / total,
        "outside steps": 1 - in_steps["seconds"] / total,
        "seconds of steps": in_steps["seconds"],
    }


def floors(folder: Path, predicted: dict[str, Any], steps: int) -> dict[str, dict[str, Any]]:
    """Seconds in bare torch, of each turn, of training and of the map; see FLOORS."""
    side = predicted["tile_own_px"] + 2 * predicted["halo_px"]
    rows, columns = predicted["grid"]
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in FLOORS}
    for _ in range(ROUNDS):
        for name, keep in FLOORS.items():
            work = str(folder / "run"), CROP_PX, BATCH, FLOOR_STEPS, side, FLOOR_TILES, keep
            turns[name].append(on_ranks(RANKS, "bench.speed.end_to_end_floor:floor", *work))
    found: dict[str, dict[str, Any]] = {}
    for name, some in turns.items():
        step_s, tile_s = ([one[what] for one in some] for what in ("step_s", "tile_s"))
        found[name] = {
            "step_s": step_s,
            "tile_s": tile_s,
            "train_s": fmean(step_s) * steps,
            "predict_s": fmean(tile_s) * -(-rows * columns // RANKS),
        }
    return found


def bench(quick: bool, size: int = 10_000) -> Found:
    """Run the demo, then its floor."""
    size, steps = (1024, 40) if quick else (size, 800)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        commands = demo(folder, size, steps)
        predicted = json.loads(commands["predict"]["said"])
        bare = floors(folder, predicted, steps)
        parts = shares(folder, commands["train"])
    for one in commands.values():
        del one["said"]
    figures: dict[str, Any] = {
        "size_px": size,
        "ranks": RANKS,
        "steps": steps,
        "commands": [{"command": name, **one} for name, one in commands.items()],
        "shares of training": parts,
        "floor": bare,
        "map": {name: predicted[name] for name in ("grid", "tile_own_px", "halo_px", "work_ratio")},
    }
    claims: list[Claim] = []
    for whose, takes in bare.items():
        taken = {name: commands[name]["seconds"] for name in ("train", "predict")}
        claims += [
            at_most(
                f"{size}²: seconds of {name} over those of {whose}",
                taken[name] / takes[f"{name}_s"],
                1.1,
            )
            for name in taken
        ]
        claims.append(
            at_most(
                f"{size}²: seconds of training's steps over those of {whose}",
                parts["seconds of steps"] / takes["train_s"],
                1.1,
            )
        )
    return figures, claims
