"""The largest image that trains on a GPU under a limit, in each way, beside what is planned.

The network is tilenet's U-Net as bench/swapping/lms.py trains it, and its words are used: off,
checkpointing of each layer group, swap of all that is saved. The planner's auto, which swaps as
many layers as must, is held against the most of the three; it computes no group again.
"""

import time
from dataclasses import asdict, replace
from functools import partial

from bench.gpu.gpu_part import Asked, Figures
from bench.gpu.gpu_roofline import facts_of
from bench.report import Claim, Found, at_most
from bench.swapping.lms import MODES, place_of
from bench.swapping.lms_networks import CLASSES, KINDS
from bench.swapping.lms_sizes import Largest, largest, peak_of
from bench.swapping.lms_training import Place, Way, slabs_of
from tilenet.errors import TilenetError
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.parallel.swap.copies import measure_bandwidth
from tilenet.planning.machines.machine import Machine
from tilenet.planning.machines.read import machine
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.swap.plan import Demand, Speeds, plan_swaps
from tilenet.planning.time.roofline import roofline

__all__ = ["planned_bytes", "sizes"]

LIMIT = 8 << 30
OFF = 0.15  # by which the planner may miss the pixels that train without anything


def sizes(asked: Asked) -> Found:
    """Search by what trains, then by what is planned."""
    kind = replace(KINDS["unet"], unit=64 if asked.cuda else 16)
    limit_gib, width = (asked.limit_gib, 0) if asked.cuda else (6 / 1024, 4)
    most = LIMIT // 2 if asked.quick else LIMIT
    place = place_of(asked.device, limit_gib, width, asked.quick, most)
    bandwidth = measure_bandwidth(slabs_of(place), place.device)
    try:
        facts = facts_of(asked)  # they decide little about what fits
    except TilenetError:
        if asked.machine:
            raise
        facts = machine("slurm")
    begun = time.perf_counter()
    # What is planned takes its time too, on the host.
    until = begun + (asked.until - begun) * 0.6
    trained: dict[str, Largest] = {}
    for mode in MODES:
        start = trained["off"].size if trained else 4 * kind.unit
        peaks = partial(peak_of, kind, place, Way(mode), 1)
        trained[mode] = largest(peaks, place.limit_bytes, kind.unit, start, until)
        print(mode, trained[mode], flush=True)
    if not trained["off"].size:
        raise RuntimeError("not one image trained within the limit or the time")
    trained["auto"] = max(trained.values(), key=lambda one: one.size)
    rows: list[Figures] = []
    claims = []
    for mode, found in trained.items():
        row: Figures = {"mode": mode, **asdict(found)}
        rows.append(row)
        if mode == "checkpointing":
            continue
        planner = partial(planned_bytes, place, bandwidth, facts, mode)
        plan = largest(planner, place.limit_bytes, kind.unit, found.size, asked.until)
        row["planned"] = asdict(plan)
        if found.size and found.to_the_end and plan.to_the_end:
            row["planned_pixels_over_trained"] = ratio = (plan.size / found.size) ** 2
            claims.append(_claim(mode, ratio))
    figures = {
        "limit_gib": place.limit_bytes / 2**30,
        "width": place.width,
        "copies_gib_per_s": bandwidth / 2**30,
        "rows": rows,
    }
    return figures, claims if asked.cuda else []


def _claim(mode: str, ratio: float) -> Claim:
    if mode == "off":
        return at_most("error of the largest image planned, off", abs(ratio - 1), OFF)
    return at_most(f"pixels planned over those that train, {mode}", ratio, 1 + OFF)


def planned_bytes(
    place: Place, bandwidth: float, facts: Machine, mode: str, side: int
) -> int | None:
    """Bytes that the planner says of a step on one image; None: whatever is done, it does not fit.

    Raises:
        TilenetError: A map is too large.
    """
    # as lms_networks.KINDS["unet"]
    options = UNetOptions(4, 2, place.width, bands=3, classes=CLASSES, norm="instance")
    layers = unet_layers(options)
    costs = layer_bytes(layers, side, side)
    demand = Demand(costs, [len(layers)], 1, "never", "sgd-momentum", [place.device])
    if mode == "off":
        return demand.peak
    times = roofline(layers, side, side, "float32", facts)
    speeds = Speeds(times, bandwidth, place.min_bytes)
    plan = plan_swaps(demand, place.limit_bytes, lambda: speeds, everything=mode == "swap")
    return None if plan is None else plan.device_bytes
