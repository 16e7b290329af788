"""The demo on a large scene: seconds and memory of each command, over those of bare torch.

Makes the demo's scene, trains on it and maps it on 2 ranks of one thread, as `SIZE=10000 RANKS=2
make demo` does. Beside it stand two floors: the same layers on crops of the same size, and on tiles
that overlap by the network's halo, in bare torch on as many processes, which do not talk, on pixels
in memory and forever the same; as torch is, and with malloc set to keep large buffers, as tilenet
sets it. The two take turns between training and the map, and what they take is the mean of their
turns: training's seconds are the sum of what its steps took while the machine was quicker and
slower, not of the least. What is above the floors is start, statistics of the scene, reading, sums
over ranks, writing, the report; the map is computed by sweeps, which compute less than tiles do.
--quick trains 40 steps on a scene of 1024².
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.report import ROOT, Claim, Found, at_most, environment, on_ranks
from bench.scenes import history
from tilenet.geometry.layers import Activation, Conv, Dropout, Join, Layer, Pool, Stash, Upsample
from tilenet.parallel.ranks.malloc import keep_freed_buffers
from tilenet.storage.checkpoints import load_json
from tilenet.storage.network_json import NetworkRecord

RANKS = 2
CROP_PX, BATCH = 128, 8  # demo/run.yaml
FLOOR_STEPS, FLOOR_TILES, ROUNDS = 60, 4, 5
# Of the floors' tiles: the side without halo, at most; the halo; the pixels that divide a side.
TILE_PX, HALO_PX, UNIT_PX = 912, 48, 16
LABELLED = 0.6  # of the demo's pixels, which costs nothing
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


def demo(folder: Path, size: int, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The demo's commands and the floors, by name."""
    ranks, python = ["mpiexec", "-n", str(RANKS), sys.executable], sys.executable
    scene, trained = str(folder / "scene.tif"), str(folder / "run")
    found = {"scene": run(python, "demo/make_scene.py", str(folder), "--size", str(size))}
    keys = {"images": scene, "labels": folder / "labels_train.tif", "output": trained}
    keys |= {"steps": str(steps)}
    options = [f"--{name}={value}" for name, value in keys.items()]
    found["train"] = run(*ranks, "-m", "tilenet", "train", "-c", "demo/run.yaml", *options)
    bare = floors(folder, size, steps)
    arguments = [trained, scene, str(folder / "map.tif"), "--json"]
    found["predict"] = run(*ranks, "-m", "tilenet", "predict", *arguments)
    test = [str(folder / "map.tif"), str(folder / "labels_test.tif")]
    found["evaluate"] = run(python, "-m", "tilenet", "evaluate", *test)
    return found, bare


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


def floors(folder: Path, size: int, steps: int) -> dict[str, dict[str, Any]]:
    """Seconds in bare torch, of each turn, of training and of the map; see FLOORS."""
    across = -(-size // TILE_PX)
    side = -(-size // across // UNIT_PX) * UNIT_PX + 2 * HALO_PX
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in FLOORS}
    for _ in range(ROUNDS):
        for name, keep in FLOORS.items():
            turns[name].append(on_ranks(RANKS, floor, folder / "run", side, keep))
    found: dict[str, dict[str, Any]] = {}
    for name, some in turns.items():
        step_s, tile_s = ([one[what] for one in some] for what in ("step_s", "tile_s"))
        found[name] = {
            "step_s": step_s,
            "tile_s": tile_s,
            "train_s": fmean(step_s) * steps,
            "predict_s": fmean(tile_s) * -(-(across**2) // RANKS),
        }
    return found


def bench(quick: bool, size: int = 10_000) -> Found:
    """Run the demo, then its floor."""
    size, steps = (1024, 40) if quick else (size, 800)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        commands, bare = demo(folder, size, steps)
        predicted = json.loads(commands["predict"]["said"])
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


class Bare(nn.Module):
    """Torch's own modules in the order of the layers."""

    def __init__(self, layers: tuple[Layer, ...]) -> None:
        super().__init__()
        self.layers, self.bands = layers, layers[0].in_channels
        self.made = nn.ModuleList(_module(layer) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K, H, W) of (B, C, H, W)."""
        stashed: dict[str, Tensor] = {}
        for layer, module in zip(self.layers, self.made, strict=True):
            if isinstance(layer, Stash):
                stashed[layer.name] = x
            elif isinstance(layer, Join):
                x = torch.cat((x, *(stashed.pop(name) for name in layer.kept)), dim=1)
            else:
                x = module(x)
        return x


def _module(layer: Layer) -> nn.Module:
    match layer:
        case Conv():
            return nn.Conv2d(
                layer.in_channels, layer.out_channels, layer.kernel, layer.stride,
                layer.padding, layer.dilation, bias=layer.bias,
            )  # fmt: skip
        case Pool(mode="max"):
            return nn.MaxPool2d(layer.kernel, layer.stride, layer.padding)
        case Upsample():
            return nn.Upsample(scale_factor=layer.factor, mode=layer.mode)
        case Dropout():
            return nn.Dropout2d(layer.probability)
        case Activation():
            return nn.LeakyReLU(layer.slope, inplace=True)
        case Stash() | Join():
            return nn.Identity()
        case _:
            raise SystemExit(f"no bare module for a layer of kind {layer.kind}")


def timed(run: Callable[[], object], times: int) -> float:
    """Mean seconds of runs but for the first, which allocates."""
    run()
    began = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - began) / times


def train_s(network: Bare, crops: int, classes: int) -> float:
    """Seconds of a step on crops."""
    x = torch.randn(crops, network.bands, CROP_PX, CROP_PX)
    target = torch.randint(classes, (crops, CROP_PX, CROP_PX))
    target[torch.rand(target.shape) > LABELLED] = 255
    optimizer = torch.optim.AdamW(network.train().parameters(), 1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x), target, ignore_index=255)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return timed(step, FLOOR_STEPS)


def tile_s(network: Bare, side: int) -> float:
    """Seconds of a tile of a map."""
    x = torch.randn(1, network.eval().bands, side, side)
    with torch.inference_mode():
        return timed(lambda: network(x).argmax(1).byte(), FLOOR_TILES)


def floor(run: str, side: int, keep: bool) -> dict[str, float]:
    """Measure both on all ranks at once; the slowest rank's."""
    from mpi4py import MPI

    if keep:
        keep_freed_buffers()
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    record = NetworkRecord.from_json(load_json(Path(run) / "last" / "network.json"))
    network = Bare(record.layers)
    comm.Barrier()
    step_s = train_s(network, -(-BATCH // comm.size), len(record.classes))
    comm.Barrier()
    found = comm.allgather((step_s, tile_s(network, side)))
    slowest = [max(some) for some in zip(*found, strict=True)]
    return dict(zip(("step_s", "tile_s"), slowest, strict=True))
