"""Maps by sweeps, by tiles and in plain PyTorch on the whole image: seconds, work and memory.

    pip install -c constraints.txt '.[bench]'
    python -m bench.speed.sweep [--quick] [--side PX] [--times N] [NETWORK …]

Random images in memory, float32, one thread, no file. The ways take turns, each in a process of its
own: CPU seconds (the fastest of several), operations (torch's counter), bytes of tensors that live
at one time, and the peak of the process beyond what it had before.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

from bench.exactness.networks import choices
from bench.report import ROOT, Claim, at_most, report

WAYS = ("plain", "sweep", "tiles")
OURS = {"small U-Net": (4, 16), "large U-Net": (4, 64)}  # poolings and channels
BROUGHT = ("Unet/resnet34", "DeepLabV3Plus/resnet34")


def built(name: str) -> Any:
    """Layers, network and bands."""
    import torch

    from tilenet.adoption.adopt import adopt
    from tilenet.geometry.unet import UNetOptions, unet_layers
    from tilenet.model.network import build_network

    torch.manual_seed(0)
    if name in OURS:
        poolings, base = OURS[name]
        layers = unet_layers(UNetOptions(poolings, base=base, bands=4, classes=5, norm="batch"))
        return layers, build_network(layers).eval()
    adopted = adopt(choices()[name].module().eval(), 4)
    return adopted.layers, adopted.network().eval()


def way_of(name: str, way: str, side: int) -> dict[str, Any]:
    """What one way takes; in a process of its own."""
    import torch
    from mpi4py import MPI
    from torch.utils.flop_counter import FlopCounterMode

    from tilenet.geometry.halo import context_of
    from tilenet.geometry.tiles import halo_rule
    from tilenet.geometry.windows import Window
    from tilenet.mapping.choose import CPU_BYTES, CPU_TILE_PX, SWEEP_TIMES
    from tilenet.mapping.job import MapJob
    from tilenet.mapping.mapper import Computed, Mapper
    from tilenet.parallel.health.watchdog import Watchdog
    from tilenet.planning.maps import MapQuestion, choose_map
    from tilenet.planning.memory.live import LiveBytes
    from tilenet.planning.memory.swept import swept_bytes

    torch.set_num_threads(1)
    layers, network = built(name)
    rule = halo_rule("exact", context_of(layers), layers, 0)
    budget = SWEEP_TIMES * CPU_BYTES if way == "sweep" else 0
    asked = MapQuestion(
        layers, (side, side), rule, halo_asked=False, tile_px=None, num_ranks=1, item_bytes=4,
        budget_bytes=CPU_BYTES, most_px=CPU_TILE_PX, sweep_bytes=budget,
    )  # fmt: skip
    plan = choose_map(asked)
    pixels = torch.randn(1, 4, side, side)
    sums: list[float] = []

    class InMemory(Mapper):
        """Reads a random image."""

        def __init__(self) -> None:
            self.record: Any = SimpleNamespace(layers=layers)
            self.tiling, self.dtype, self.offset_px = plan.tiling, torch.float32, 0

        def input(self, window: Window) -> Any:
            rows, cols = (
                slice(first, first + count)
                for first, count in ((window.row, window.height), (window.col, window.width))
            )
            return pixels[:, :, rows, cols].clone(), pixels[0, 0, rows, cols].numpy() < 9

    class Summing:
        """Lets pieces go."""

        def wants(self, rank: int, window: Window) -> bool:
            return True

        def take(self, rank: int, window: Window, computed: Computed | None) -> None:
            assert computed is not None
            sums.append(float(computed.logits.double().sum()))

    def run() -> None:
        sums.clear()
        if way == "plain":
            with torch.inference_mode():
                sums.append(float(network(pixels.clone()).double().sum()))
            return
        job = MapJob(
            plan, InMemory(), network, (len(layers),), (torch.device("cpu"),), "float32",
            Watchdog(0), brief=True,
        )  # fmt: skip
        comm = MPI.COMM_SELF
        job.map(job.fix_statistics(comm), comm, Summing())

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    run()
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    with LiveBytes() as live, FlopCounterMode(display=False) as counter:
        run()
    rows = max(span.own for span in plan.tiling.rows)
    return {
        "cpu_seconds": seconds,
        "peak_bytes": peak * 1024,
        "live_bytes": live.peak,
        "predicted_bytes": swept_bytes(layers, side, side, rows, 4) if way == "sweep" else None,
        "operations": counter.get_total_flops(),
        "sum": sum(sums),
        "grid": plan.tiling.grid if way != "plain" else (1, 1),
        "halo_px": rule.halo_px,
        "passes": len(plan.passes) + 1,
    }


def compared(name: str, side: int, times: int) -> dict[str, Any]:
    """All ways in turns, the fastest run of each."""
    found: dict[str, Any] = {}
    for _ in range(times):
        for way in WAYS:
            command = [sys.executable, "-m", "bench.speed.sweep", "--child", way, "--side"]
            ended = subprocess.run(
                [*command, str(side), name], capture_output=True, text=True, check=False, cwd=ROOT
            )
            if ended.returncode:
                raise RuntimeError(f"{name}, {way} failed:\n{ended.stderr}")
            one = json.loads(ended.stdout.splitlines()[-1])
            if way not in found or one["cpu_seconds"] < found[way]["cpu_seconds"]:
                found[way] = one
    print(f"{name}: {found}", flush=True)
    return found


def claims_of(name: str, found: dict[str, Any]) -> list[Claim]:
    """What a sweep of this network should reach."""
    plain, sweep, tiles = (found[way] for way in WAYS)
    once = sweep["passes"] == 1
    return [
        at_most(f"{name}: operations over plain", sweep["operations"] / plain["operations"], 1.01)
        if once
        else at_most(
            f"{name}: operations over tiles", sweep["operations"] / tiles["operations"], 1
        ),
        at_most(f"{name}: time over plain", sweep["cpu_seconds"] / plain["cpu_seconds"], 1.0),
        at_most(
            f"{name}: time over tiles",
            sweep["cpu_seconds"] / tiles["cpu_seconds"],
            0.9 if name in OURS else 0.5,
        ),
        at_most(f"{name}: live bytes over plain", sweep["live_bytes"] / plain["live_bytes"], 0.34),
        at_most(
            f"{name}: predicted bytes off by",
            abs(sweep["predicted_bytes"] / sweep["live_bytes"] - 1),
            0.05,
        ),
    ]


def main() -> None:
    """Map by all ways and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--child", choices=WAYS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(way_of(given.networks[0], given.child, given.side)))
        return
    side, times = (1152, 1) if given.quick else (given.side, given.times)
    names = given.networks or ([*OURS][:1] if given.quick else [*OURS, *BROUGHT])
    figures: dict[str, Any] = {"side": side}
    claims: list[Claim] = []
    for name in names:
        figures[name] = compared(name, side, times)
        claims += claims_of(name, figures[name])
    report("sweep", figures, claims)


if __name__ == "__main__":
    main()
