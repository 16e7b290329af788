"""Sweeps next to tiles and to plain PyTorch on the whole image: seconds, work and memory.

Random images in memory, float32, one thread, no file. MONAI's windows are as large as our tiles
read, with overlaps of a quarter and Gaussian weights. The ways take turns, each in a process of its
own: CPU seconds (the fastest of several), operations (torch's counter), bytes of tensors that live
at one time, and the peak of the process beyond what it had before. A step of training is forward,
cross-entropy and backward, with norms frozen. Operations and live bytes are counted in a second run
of plain PyTorch and of the sweep, or in the one run where nothing is compared. A whole image of
10 000² in a step on one rank:

    python -m bench sweep --sides 10016 --works step --ways sweep --times 1 \
        --networks "small U-Net" "middle U-Net" DeepLabV3Plus/resnet34
"""

import resource
import sys
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bench.exactness.networks import choices
from bench.report import Claim, Found, alone, at_most
from tilenet.adoption.adopt import adopt
from tilenet.geometry.halo import context_of
from tilenet.geometry.halo_rule import HaloRule, halo_rule
from tilenet.geometry.layers import Layer
from tilenet.geometry.tiles import Cut, Tiling, cut, owned
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.geometry.windows import Window
from tilenet.mapping.choose import CPU_BYTES, CPU_TILE_PX, SWEEP_TIMES
from tilenet.mapping.mapper import Computed, Mapper
from tilenet.model.network import Network, build_network
from tilenet.model.origin import Origin
from tilenet.parallel.exchange.swept_training import SweptPipe
from tilenet.planning.kept_maps import kept_cells
from tilenet.planning.machines.read import machine
from tilenet.planning.maps.choose import choose_map
from tilenet.planning.maps.question import MapPlan, MapQuestion
from tilenet.planning.memory.live import LiveBytes
from tilenet.planning.memory.sweeps.swept_maps import swept_bytes
from tilenet.planning.memory.sweeps.trained_sweeps import ALL_CELLS, plan_sweeps, trained_bytes

WAYS = ("plain", "sweep", "tiles", "monai")
COUNTED = ("plain", "sweep")
OURS = {
    "small U-Net": (4, 16),
    "middle U-Net": (4, 32),
    "large U-Net": (4, 64),
}  # poolings and channels
MAPPED = ("small U-Net", "large U-Net", "Unet/resnet34", "DeepLabV3Plus/resnet34")
TRAINED = ("small U-Net", "middle U-Net", "Unet/resnet34", "DeepLabV3Plus/resnet34")
AVERAGED = ("DeepLabV3Plus/resnet34",)  # of all the image, so that no tile is trained by itself
CPU = torch.device("cpu")


def built(name: str) -> tuple[tuple[Layer, ...], Network]:
    """A network by name."""
    torch.manual_seed(0)
    if name in OURS:
        poolings, base = OURS[name]
        layers = unet_layers(UNetOptions(poolings, base=base, bands=4, classes=5, norm="batch"))
        return layers, build_network(layers)
    adopted = adopt(choices()[name].module(), 4)
    return adopted.layers, adopted.network()


def planned(layers: tuple[Layer, ...], side: int, way: str) -> MapPlan:
    """How the image is mapped on one rank."""
    rule, sweeps = halo_rule("exact", layers), way == "sweep"
    asked = MapQuestion(
        layers, (side, side), rule, halo_asked=False, tile_px=None, num_ranks=1, item_bytes=4,
        budget_bytes=CPU_BYTES, most_px=CPU_TILE_PX,
        sweep_bytes=SWEEP_TIMES * CPU_BYTES if sweeps else 0,
    )  # fmt: skip
    return choose_map(asked)


class InMemory(Mapper):
    """Reads a random image."""

    def __init__(self, layers: tuple[Layer, ...], tiling: Tiling, pixels: Tensor) -> None:
        self.record: Any = SimpleNamespace(layers=layers, opaque=None)
        self.tiling, self.pixels, self.dtype, self.offset_px = tiling, pixels, pixels.dtype, 0

    def input(self, window: Window) -> Any:
        rows = slice(window.row, window.row + window.height)
        cols = slice(window.col, window.col + window.width)
        return self.pixels[:, :, rows, cols].clone(), self.pixels[0, 0, rows, cols].numpy() < 9


class Summing:
    """Lets pieces go."""

    total = 0.0

    def wants(self, rank: int, window: Window) -> bool:
        return True

    def take(self, rank: int, window: Window, computed: Computed | None) -> None:
        assert computed is not None
        self.total += float(computed.logits.sum(dtype=torch.float64))


def mapping(name: str, way: str, side: int, once: bool) -> dict[str, Any]:
    """What a map by one way takes; in a process of its own."""
    from mpi4py import MPI

    from tilenet.mapping.job import MapJob, Placement
    from tilenet.parallel.health.watchdog import Watchdog

    layers, network = built(name)
    network.eval()
    plan, pixels = planned(layers, side, way), torch.randn(1, 4, side, side)

    def run() -> float:
        if way == "plain":
            with torch.inference_mode():
                return float(network(pixels.clone()).sum(dtype=torch.float64))
        if way == "monai":
            from monai.inferers import sliding_window_inference

            window = max(span.read for span in plan.tiling.rows)
            with torch.inference_mode():
                whole = sliding_window_inference(
                    pixels.clone(), window, 1, network, mode="gaussian"
                )
            return float(whole.sum(dtype=torch.float64))
        mapper, sink = InMemory(layers, plan.tiling, pixels), Summing()
        placement = Placement((len(layers),), (CPU,), "float32")
        job = MapJob(plan, mapper, network, placement, Watchdog(0))
        job.map(job.fix_statistics(MPI.COMM_SELF), MPI.COMM_SELF, sink)
        return sink.total

    rows = max(span.own for span in plan.tiling.rows)
    predicted = swept_bytes(layers, side, side, rows, 4) if way == "sweep" else 0
    predicted += 4 * kept_cells(layers, plan.kept_maps, plan.tiling.extended)
    figures = taken(run, predicted, counts=way in COUNTED, once=once)
    return {"passes": len(plan.passes) + 1, "grid": plan.tiling.grid, **figures}


def training(name: str, way: str, side: int, once: bool) -> dict[str, Any]:
    """What a step by one way takes; in a process of its own."""
    layers, network = built(name)
    network.train()
    network.mask_key.images = (0,)
    for part in network:
        if isinstance(part, torch.nn.BatchNorm2d):
            part.eval()
    image = torch.randn(1, 4, side, side)
    labels = torch.randint(0, 5, (1, side, side), dtype=torch.uint8)
    plan, unit = planned(layers, side, "tiles"), context_of(layers).alignment_px
    sweeps = plan_sweeps(layers, side, side, 4, machine("local").memory_bytes)
    keeps, strip_rows = bool(sweeps.kept_maps), sweeps.edges[1]
    whole = cut(side, side, Cut(grid=(1, 1)), HaloRule(0, unit))
    pipe = SweptPipe(network, layers, [CPU], "float32", lambda rows, cols: sweeps)

    def loss_of(logits: Tensor, own: Window) -> Tensor:
        rows, cols = slice(own.row, own.row + own.height), slice(own.col, own.col + own.width)
        wanted = labels[:, rows, cols].long()
        return torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")

    def run() -> float:
        network.zero_grad()
        total = 0.0
        if way == "tiles":
            for tile in plan.tiling.tiles:
                read = tile.read
                rows = slice(read.row, read.row + read.height)
                cols = slice(read.col, read.col + read.width)
                loss = loss_of(owned(network(image[:, :, rows, cols].clone()), tile), tile.own)
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
            return total
        if way == "plain":
            loss = loss_of(network(image.clone()), Window(0, 0, side, side))
        else:
            loss = pipe(image, Origin((0,), whole, (0,)), loss_of)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    predicted = 0
    if way == "sweep":
        predicted = trained_bytes(layers, side, side, strip_rows, 4, ALL_CELLS * keeps)
    return {
        "strip_rows": strip_rows,
        "keeps": keeps,
        "grid": plan.tiling.grid,
        **taken(run, predicted, counts=way in COUNTED, once=once),
    }


class InAll(nullcontext[None]):
    """In place of torch's, which has hooks on the inputs of modules: a strip's may be leaves."""

    parents = ("Global",)


def taken(
    run: Callable[[], float], predicted: int, *, counts: bool, once: bool = False
) -> dict[str, Any]:
    """Seconds and peak of a run; where it counts, operations and live bytes of another or of it."""
    torch.set_num_threads(1)
    live, counter = LiveBytes(), cast(Any, FlopCounterMode(display=False))
    counter.mod_tracker = InAll()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with live if once else nullcontext(), counter if once else nullcontext():
        total = run()
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    figures = {"cpu_seconds": seconds, "peak_bytes": peak * 1024, "sum": total}
    if not counts:
        return figures
    if not once:
        with live, counter:
            run()
    counted = {"live_bytes": live.peak, "operations": counter.get_total_flops()}
    return figures | counted | {"predicted_bytes": predicted}


def compared(
    work: Callable[..., Any], name: str, side: int, times: int, ways: Collection[str]
) -> dict[str, Any]:
    """Ways in turns, the fastest run of each."""
    found: dict[str, Any] = {}
    possible = WAYS if work is mapping else WAYS[: 2 if name in AVERAGED else 3]
    for _ in range(times):
        for way in (way for way in possible if way in ways):
            one = alone(work, name, way, side, tuple(ways) == ("sweep",))
            print(f"{work.__name__}, {name}, {side}², {way}: {one}", file=sys.stderr, flush=True)
            if way not in found or one["cpu_seconds"] < found[way]["cpu_seconds"]:
                found[way] = one
    return found


def ratio(found: dict[str, Any], what: str, way: str, over: str) -> float:
    """One figure of a way over that of another."""
    return float(found[way][what] / found[over][what])


def claims_of_map(case: str, name: str, found: dict[str, Any]) -> list[Claim]:
    """What a map by a sweep should reach."""
    least, claims = {"plain": 1.0, "tiles": 0.9 if name in OURS else 0.5, "monai": 0.7}, []
    for way in (way for way in least if way in found):
        over = ratio(found, "cpu_seconds", "sweep", way)
        claims.append(at_most(f"{case}: time over {way}", over, least[way]))
    if "plain" in found:
        work, live = (ratio(found, what, *COUNTED[::-1]) for what in ("operations", "live_bytes"))
        claims.append(at_most(f"{case}: operations over plain", work, 1.01))
        claims.append(at_most(f"{case}: live bytes over plain", live, 0.1))
    return [*claims, predicted_claim(case, found)]


def claims_of_step(case: str, found: dict[str, Any]) -> list[Claim]:
    """What a step by a sweep should reach."""
    least, claims = {"plain": 1.4, "tiles": 1.0}, []
    for way in (way for way in least if way in found):
        over = ratio(found, "cpu_seconds", "sweep", way)
        claims.append(at_most(f"{case}: time over {way}", over, least[way]))
    if "plain" in found:
        live = ratio(found, "live_bytes", "sweep", "plain")
        claims.append(at_most(f"{case}: live bytes over plain", live, 1 / 3))
    return [*claims, predicted_claim(case, found)]


def predicted_claim(case: str, found: dict[str, Any]) -> Claim:
    """How far the prediction of a sweep's bytes is off."""
    off = found["sweep"]["predicted_bytes"] / found["sweep"]["live_bytes"] - 1
    return at_most(f"{case}: predicted bytes off by", abs(off), 0.05)


def bench(
    quick: bool,
    networks: tuple[str, ...] = MAPPED,
    sides: tuple[int, ...] = (2048,),
    works: tuple[str, ...] = ("map", "step"),
    ways: tuple[str, ...] = WAYS,
    times: int = 2,
) -> Found:
    """Map and train by several ways and compare; the sweep is one of them."""
    figures: dict[str, Any] = {}
    claims: list[Claim] = []
    if quick:
        networks, times = networks[:1], 1
    for side in sides:
        if "map" in works:
            for name in networks:
                case = f"map, {name}, {side if not quick else 1152}²"
                figures[case] = compared(mapping, name, side if not quick else 1152, times, ways)
                claims += claims_of_map(case, name, figures[case])
        if "step" in works:
            for name in (name for name in networks if name in TRAINED):
                case = f"step, {name}, {side if not quick else 512}²"
                figures[case] = compared(training, name, side if not quick else 512, times, ways)
                claims += claims_of_step(case, figures[case])
    return figures, claims
