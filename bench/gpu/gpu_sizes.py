"""The largest image that trains on a GPU under a limit, in each way, beside what is planned.

The network is tilenet's U-Net as bench/swapping/lms.py trains it, and its words are used: off,
checkpointing of each layer group, swap of all that is saved, and auto (keep, recompute or swap,
group by group).
"""

import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from bench.gpu.gpu_part import Asked, Figures, Found
from bench.gpu.gpu_roofline import machine_of
from bench.report import at_least, at_most
from bench.swapping.lms import MODES
from bench.swapping.lms_networks import CLASSES, KINDS, Kind
from bench.swapping.lms_sizes import largest, leanest
from bench.swapping.lms_training import Place, bandwidth
from tilenet.errors import TilenetError
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.parallel.swap.actions import Action
from tilenet.planning.machines import Machine, machine
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.partition import partition_bytes
from tilenet.planning.swap.choose import predict
from tilenet.planning.swap.groups import layer_groups
from tilenet.planning.swap.plan import Speeds, plan_swaps, swap_everything
from tilenet.planning.time.roofline import roofline

__all__ = ["planned_bytes", "searched", "sizes"]

LIMIT = 8 << 30
ROOM = 10  # times the limit, on the host
OFF = 0.15  # by which the planner may miss the pixels that train without anything
PEAK = Callable[[int], int | None]


class _TimeIsOver(Exception):
    pass


def sizes(asked: Asked) -> Found:
    """Search by what trains, then by what is planned."""
    place, kind = _place(asked), replace(KINDS["unet"], unit=64 if asked.cuda else 16)
    out, back = bandwidth(place, *(() if asked.cuda else (1 << 20,)))
    place = replace(place, bandwidth=min(out, back))
    begun = time.perf_counter()
    # What is planned takes its time too, on the host.
    half = begun + (asked.until - begun) * 0.6
    rows: list[Figures] = []
    for mode in MODES:
        start = rows[-1]["side"] // kind.unit if rows else 4
        row = searched(partial(_peak, kind, place, mode), place.limit_bytes, kind, start, half)
        rows.append({"mode": mode, **row})
        print(rows[-1], flush=True)
    facts = _facts(asked)
    for row in rows:
        start = (row["side"] or kind.unit) // kind.unit
        bytes_of = partial(planned_bytes, place, facts, row["mode"])
        plan = searched(bytes_of, place.limit_bytes, kind, start, asked.until)
        row["planned_side"], row["planned_to_the_end"] = plan["side"] or None, plan["to_the_end"]
        if row["side"] and row["to_the_end"] and plan["to_the_end"]:
            row["planned_pixels_over_trained"] = (plan["side"] / row["side"]) ** 2
    figures = {
        "limit_gib": place.limit_bytes / 2**30,
        "width": place.width,
        "out_gib_per_s": out / 2**30,
        "back_gib_per_s": back / 2**30,
        "rows": rows,
    }
    if not rows[0]["side"]:
        raise RuntimeError("not one image trained within the limit or the time")
    claims = []
    sides = {row["mode"]: row["side"] for row in rows}
    claims.append(
        at_least(
            "pixels that auto trains over the most of off, checkpointing and swap",
            (sides["auto"] / max(sides.values())) ** 2,
            1.0,
        )
    )
    for row in rows:
        if "planned_pixels_over_trained" in row:
            ratio = row["planned_pixels_over_trained"]
            if row["mode"] == "off":
                claims.append(
                    at_most("error of the largest image planned, off", abs(ratio - 1), OFF)
                )
            else:
                claims.append(
                    at_most(f"pixels planned over those that train, {row['mode']}", ratio, 1 + OFF)
                )
    return figures, claims if asked.cuda else []


def searched(peak_of: PEAK, limit: int, kind: Kind, start: int, until: float) -> Figures:
    """The largest side, and what is known of it when the time is over.

    Args:
        peak_of: Bytes of a step on one image of a side; None: more than there is.
        until: By `time.perf_counter`.
    """
    fits: dict[int, int] = {}
    fails: list[int] = []

    def timed(side: int) -> int | None:
        if time.perf_counter() > until:
            raise _TimeIsOver
        peak = peak_of(side)
        if peak is not None and peak <= limit:
            fits[side] = peak
        else:
            fails.append(side)
        return peak

    finished = True
    try:
        largest(timed, limit, kind.unit, max(start, 1), kind.dimensions)
    except _TimeIsOver:
        finished = False
    side = max(fits, default=0)
    return {
        "side": side,
        "megapixels": side**kind.dimensions / 1e6,
        "peak_mib": fits[side] / 2**20 if side else None,
        "next_side": min(fails, default=None),
        "to_the_end": finished,
    }


def planned_bytes(place: Place, facts: Machine, mode: str, side: int) -> int | None:
    """Bytes that the planner says of a step on one image; None: whatever is done, it does not fit.

    Raises:
        TilenetError: A map is too large.
    """
    # as lms_networks.KINDS["unet"]
    options = UNetOptions(4, 2, place.width, bands=3, classes=CLASSES, norm="instance")
    layers = unet_layers(options)
    costs, balance = layer_bytes(layers, side, side), [len(layers)]
    step = (costs, balance, 1, "never", "sgd-momentum")
    (size,) = partition_bytes(*step)  # type: ignore[arg-type]
    if mode == "off":
        return size.total
    times = roofline(layers, side, side, "float32", facts)
    speeds = Speeds(times, place.bandwidth, place.min_bytes)
    if mode == "swap":
        return swap_everything(*step, speeds).partitions[0].device_bytes  # type: ignore[arg-type]
    if mode == "auto":
        plan = plan_swaps(*step, [place.limit_bytes], lambda: speeds)  # type: ignore[arg-type]
        return None if plan is None else plan.partitions[0].device_bytes
    groups = layer_groups(costs, times, 0, len(layers), place.min_bytes)
    keep: list[Action] = ["keep"] * len(groups)
    again: list[Action] = ["checkpoint" if group.may_checkpoint else "keep" for group in groups]
    kept, less = (predict(groups, actions, place.bandwidth).peak_bytes for actions in (keep, again))
    return size.total - kept + less


def _place(asked: Asked) -> Place:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    host = min(free, machine("local").host_bytes) * 3 // 4  # a container may have less
    if not asked.cuda:
        return Place(asked.device, 6 << 20, host, 4)
    total = torch.cuda.get_device_properties(asked.device).total_memory
    # What is swapped out is several times as large, and must fit the host.
    limit = min(total, host // ROOM, LIMIT // 2 if asked.quick else LIMIT)
    if asked.limit_gib is not None:
        limit = min(total, int(asked.limit_gib * 2**30))
        host = max(host, ROOM * limit)
    torch.cuda.set_per_process_memory_fraction(limit / total, asked.device)
    return Place(asked.device, limit, host, 64)


def _facts(asked: Asked) -> Machine:
    """Of the machine whose speeds the planner reckons with; they decide little about what fits."""
    if asked.machine:
        return machine(asked.machine)
    try:
        return machine_of(torch.cuda.get_device_name(asked.device) if asked.cuda else "cpu")
    except TilenetError:
        return machine("slurm")


def _peak(kind: Kind, place: Place, mode: str, side: int) -> int | None:
    """Of the leanest way; None: the device ran out of memory, whichever library says so."""
    try:
        return leanest(kind, place, mode, 1, side)[1]
    except RuntimeError as error:
        words = str(error).lower()
        # of cuDNN, which finds no engine whose workspace there is room for
        if place.cuda and any(word in words for word in ("out of memory", "cudnn", "engine")):
            gc.collect()
            torch.cuda.empty_cache()
            return None
        raise
