"""The demo on a large scene: seconds of each command, over those of bare torch.

Makes the demo's scene, trains on it and maps it on 2 ranks of one thread, as `SIZE=10000 RANKS=2
make demo` does. Its floors are the same layers in bare torch on as many processes, which do not
talk, on pixels in memory and forever the same: on crops of the same size, and on tiles that overlap
by the network's halo; as torch is, and with malloc set to keep large buffers, as tilenet sets it.

Speeds of a machine change within minutes. So each step of the run follows one of bare torch that
keeps buffers, in the same process; the command's seconds are those without these. The next pixels
are read during the run's own step: a reader is two micro-batches ahead at most. Steps of bare torch
as it is take turns with steps that keep buffers, and their ratio counts. Tiles of both take turns
before and after the map. What is above the floors is start, statistics of the scene, reading, sums
over ranks, writing, the report; the map is computed by sweeps, which compute less than tiles do.
--quick trains 40 steps on a scene of 1024².
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.report import Claim, Found, at_most, mpiexec, on_ranks
from bench.scenes import history
from tilenet.geometry.layers import Activation, Conv, Dropout, Join, Layer, Pool, Stash, Upsample
from tilenet.parallel.ranks.malloc import keep_freed_buffers
from tilenet.storage.checkpoints import load_json
from tilenet.storage.network_json import NetworkRecord

RANKS = 2
CROP_PX, BATCH = 128, 8  # demo/run.yaml
FLOOR_STEPS, FLOOR_TILES, ROUNDS = 60, 4, 3
# Of the floors' tiles: the side without halo, at most; the halo; the pixels that divide a side.
TILE_PX, HALO_PX, UNIT_PX = 912, 48, 16
LABELLED = 0.6  # of the demo's pixels, which costs nothing
KEEPING = "bare torch that keeps buffers"
FLOORS = {"bare torch": 0, KEEPING: 1}


def timed_command(name: str, *arguments: str) -> dict[str, Any]:
    """Seconds of a command of the demo, on all ranks where it takes them."""
    ranks = RANKS if name == "predict" else 1
    began = time.perf_counter()
    mpiexec(ranks, *arguments)
    return {"command": name, "seconds": time.perf_counter() - began}


def beside_floor(arguments: list[str]) -> dict[str, Any]:
    """Train as a command line says, with a step of bare torch before each.

    Returns:
        Seconds of bare torch on the slowest rank, and those until all ranks went on.
    """
    from mpi4py import MPI

    from tilenet.__main__ import main
    from tilenet.training.step import Step

    comm, make, take = MPI.COMM_WORLD, Step.__init__, Step.take
    floors: list[Callable[[], None]] = []
    own_s, between_s = [0.0], [0.0]

    def made(self: Step, network: Any, *rest: Any) -> None:
        make(self, network, *rest)
        floors.append(step_of(Bare(network.plan.record.layers), -(-BATCH // comm.size)))

    def after_floor(self: Step, *rest: Any) -> Any:
        comm.Barrier()
        began = time.perf_counter()
        floors[0]()
        own_s[0] += time.perf_counter() - began
        comm.Barrier()
        between_s[0] += time.perf_counter() - began
        return take(self, *rest)

    Step.__init__, Step.take = made, after_floor  # type: ignore[assignment,method-assign]
    if main(["train", *arguments]):
        raise RuntimeError("the run did not end well")
    return {"floor_s": max(comm.allgather(own_s[0])), "between_s": between_s[0]}


def trained(folder: Path, steps: int) -> dict[str, Any]:
    """Seconds of the run without the floor's, of its steps, and of the floor's steps."""
    keys = {"images": folder / "scene.tif", "labels": folder / "labels_train.tif"}
    keys |= {"output": folder / "run"}
    arguments = ["-c", "demo/run.yaml", *(f"--{name}={value}" for name, value in keys.items())]
    began = time.perf_counter()
    took = on_ranks(RANKS, beside_floor, [*arguments, f"--steps={steps}"])
    seconds = time.perf_counter() - began - took["between_s"]
    names = ("seconds", "read_seconds", "reduce_seconds")
    step_s, read_s, reduce_s = map(sum, history(folder / "run", *names))
    return {
        "command": "train",
        "seconds": seconds,
        "steps_s": step_s,
        "waiting for pixels_s": read_s,
        "sums over ranks_s": reduce_s,
        "outside steps_s": seconds - step_s,
        f"{KEEPING}_s": took["floor_s"],
    }


def floors(layers_of: Path, side: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of steps and tiles in bare torch, of each turn; see FLOORS."""
    turns: dict[str, dict[str, list[float]]] = {
        name: {"step_s": [], "tile_s": []} for name in FLOORS
    }
    for _ in range(ROUNDS):
        for name, keep in FLOORS.items():
            for what, value in on_ranks(RANKS, floor, layers_of, side, keep).items():
                turns[name][what].append(value)
    return turns


def bench(quick: bool, size: int = 10_000) -> Found:
    """Run the demo and its floors."""
    size, steps = (1024, 40) if quick else (size, 800)
    across = -(-size // TILE_PX)
    side = -(-size // across // UNIT_PX) * UNIT_PX + 2 * HALO_PX
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        scene, run, mapped = (str(folder / name) for name in ("scene.tif", "run", "map.tif"))
        commands = [timed_command("scene", "demo/make_scene.py", place, "--size", str(size))]
        commands.append(trained(folder, steps))
        before = floors(folder / "run", side)
        commands.append(timed_command("predict", "-m", "tilenet", "predict", run, scene, mapped))
        after = floors(folder / "run", side)
        test = (mapped, str(folder / "labels_test.tif"))
        commands.append(timed_command("evaluate", "-m", "tilenet", "evaluate", *test))
    bare = {
        name: {what: before[name][what] + after[name][what] for what in ("step_s", "tile_s")}
        for name in FLOORS
    }
    figures: dict[str, Any] = {
        "size_px": size, "ranks": RANKS, "steps": steps, "tile_px": side,
        "commands": commands, "floor": bare,
    }  # fmt: skip
    return figures, claims_of(figures, -(-(across**2) // RANKS))


def claims_of(figures: dict[str, Any], tiles: int) -> list[Claim]:
    """Training, its steps and the map over each floor."""
    commands = {command["command"]: command for command in figures["commands"]}
    train, bare, size = commands["train"], figures["floor"], figures["size_px"]
    keeping = fmean(bare[KEEPING]["step_s"])
    claims = []
    for name, takes in bare.items():
        floor_s = train[f"{KEEPING}_s"] * fmean(takes["step_s"]) / keeping
        map_s = fmean(takes["tile_s"]) * tiles
        for what, seconds, least, goal in (
            ("training", train["seconds"], floor_s, 1.1),
            ("training's steps", train["steps_s"], floor_s, 1.1),
            ("the map", commands["predict"]["seconds"], map_s, 1.0),
        ):
            claims.append(at_most(f"{size}²: {what} over {name}", seconds / least, goal))
    return claims


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


def step_of(network: Bare, crops: int) -> Callable[[], None]:
    """A step on crops."""
    x = torch.randn(crops, network.bands, CROP_PX, CROP_PX)
    classes = network.eval()(x[:1, :, :UNIT_PX, :UNIT_PX]).shape[1]
    target = torch.randint(classes, (crops, CROP_PX, CROP_PX))
    target[torch.rand(target.shape) > LABELLED] = 255
    optimizer = torch.optim.AdamW(network.train().parameters(), 1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x), target, ignore_index=255)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


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
    step_s = timed(step_of(network, -(-BATCH // comm.size)), FLOOR_STEPS)
    comm.Barrier()
    found = comm.allgather((step_s, tile_s(network, side)))
    slowest = [max(some) for some in zip(*found, strict=True)]
    return dict(zip(("step_s", "tile_s"), slowest, strict=True))
