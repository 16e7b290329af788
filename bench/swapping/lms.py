"""Large Model Support: how large do images get under a device limit, and at what cost?

Three figures, as IBM's articles have them, for DeepLabv3+ with three encoders, PSPNet, ResNet-50, a
3-D U-Net and two U-Nets of ours:

(a) what swapping costs where it is not needed: forced on against off, at a size that fits;
(b) the largest side at one image, and the largest batch at the largest side that trains without;
(c) seconds of a step against the side, to beyond where device memory ends.

The ways: off; checkpointing of each layer group; swap (of all that is saved, as far as the limit
asks for it); auto (whichever of the three is fastest within the limit). Gradients are the same bits
in all of them. Of networks that are lists of layers, the planned bytes of a step are held against
those counted. Packages that are not installed are named, with their networks left out.

A CPU plays a device (`lms_training.py`). How many pixels fit is then counted, save for what
convolutions take inside and for gaps between a GPU's allocations. The seconds say less: a CPU
copies by itself, to pages of a file in memory, and computes so slowly that little is lost by it.
Whether copies over PCIe hide behind a GPU's work only a GPU can tell.
"""

import os
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from math import inf
from typing import Any

import torch

from bench.report import Claim, Found, at_least, at_most
from bench.swapping.lms_networks import KINDS, Kind
from bench.swapping.lms_sizes import Largest, fitting, largest, peak_of
from bench.swapping.lms_training import Place, Training, Way, seconds_side_by_side, slabs_of
from tilenet.parallel.swap.copies import measure_bandwidth
from tilenet.planning.machines.read import machine
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.partition import partition_bytes

MODES = ("off", "checkpointing", "swap")
PIXELS = 5  # times those that train without: the goal
SHARES = (0.5, 1.0, 2.0, float(PIXELS))  # of these pixels, for figure (c); and the most
QUICK = ("deeplab-mobilenet", "unet-3d", "unet-5")
Figures = dict[str, Any]


def equal_gradients(kind: Kind, place: Place) -> dict[str, Any]:
    """Whether all ways give the bits of `off`, at a small size with all that is saved swapped."""
    small = replace(place, limit_bytes=1 << 20)  # so that little is too small to be swapped
    torch.use_deterministic_algorithms(place.cuda, warn_only=True)
    training = Training(kind, small, 2, 4 * kind.unit)
    wanted = training.gradients(Way("off"))
    ways = {"again": Way("off"), "checkpointing": Way("checkpointing"), "swap": Way("swap")}
    ways["swap some"] = Way("swap", sum(one.nbytes for one in wanted) // 4)
    same = {}
    for name, way in ways.items():
        found = training.gradients(way)
        same[name] = len(found) == len(wanted) and all(
            torch.equal(a, b) for a, b in zip(found, wanted, strict=True)
        )
    torch.use_deterministic_algorithms(False)
    some = any(bool(one.abs().max() > 0) for one in wanted)
    return {**same, "gradients": len(wanted), "not zero": some}


def sizes(
    kind: Kind, place: Place, with_batches: bool
) -> tuple[dict[str, Largest], dict[str, Largest]]:
    """Figure (b): the largest side at one image, and batch at the side that `off` trains."""
    sides: dict[str, Largest] = {}
    for mode in MODES:
        start = sides["off"].size if sides else 4 * kind.unit
        of_side = partial(peak_of, kind, place, Way(mode), 1)
        sides[mode] = largest(of_side, place.limit_bytes, kind.unit, start)
        if not sides[mode].size:
            raise SystemExit(f"not one image trains within the limit ({mode}); raise --limit-gib")
    batches: dict[str, Largest] = {}
    for mode in MODES if with_batches else ():
        of_batch = partial(peak_of, kind, place, Way(mode), side=sides["off"].size)
        batches[mode] = largest(of_batch, place.limit_bytes, 1, 1)
    return _with_auto(sides), _with_auto(batches)


def _with_auto(found: dict[str, Largest]) -> dict[str, Largest]:
    return {**found, "auto": max(found.values(), key=lambda one: one.size)} if found else {}


def forced(kind: Kind, place: Place, side: int, at_least_s: float) -> Figures:
    """Figure (a): seconds of a step at a side that fits, everything swapped against nothing."""
    training = Training(kind, place, 1, side)
    with training.under(Way("swap")) as counted:
        training.step()
    off, checkpointing, swap = seconds_side_by_side(
        training, [Way(mode) for mode in MODES], at_least_s
    )
    return {
        "side": side,
        "off_s": off,
        "checkpointing_s": checkpointing,
        "forced_s": swap,
        "checkpointing_over_off": checkpointing / off,
        "forced_over_off": swap / off,
        "swapped_mib": counted.out_bytes / 2**20,
    }


def speeds(
    kind: Kind,
    place: Place,
    sides: dict[str, Largest],
    shares: tuple[float, ...],
    at_least_s: float,
) -> list[Figures]:
    """Figure (c): seconds of a step in all ways, by side."""
    rows: list[Figures] = []
    ends, most = sides["off"].size, sides["auto"].size
    wished = {
        round(ends * share ** (1 / kind.dimensions) / kind.unit) * kind.unit for share in shares
    }
    enough = most / 1.25 ** (1 / kind.dimensions)  # what is closer to the most says no more
    for side in sorted({one for one in wished if one == ends or 0 < one < enough} | {most}):
        # Host memory goes on where a device's would end: what a larger one would do.
        modes = [m for m in MODES if side <= sides[m].size or (m == "off" and not place.cuda)]
        found = [fitting(kind, place, mode, side) for mode in modes]
        training = Training(kind, place, 1, side)
        taken = seconds_side_by_side(training, [way for way, _ in found], at_least_s)
        here = [
            {
                "side": side,
                "mode": way.mode,
                "pixels_over_off": (side / ends) ** kind.dimensions,
                "seconds": seconds,
                "within_limit": peak is not None and peak <= place.limit_bytes,
            }
            for (way, peak), seconds in zip(found, taken, strict=True)
            if seconds < inf
        ]
        within = [row for row in here if row["within_limit"]]
        fastest = min(within, key=lambda row: row["seconds"], default=None)
        rows += here
        if fastest is not None:
            rows.append({**fastest, "mode": "auto", "chosen": fastest["mode"]})
    return rows


def planned(kind: Kind, place: Place, side: int) -> list[Figures]:
    """Bytes of a step as planned and as counted, at a side that fits and at twice that."""
    rows: list[Figures] = []
    for px in (side,) if place.cuda else (side, 2 * side):
        training = Training(kind, place, 1, px)
        fixed, layers = training.fixed_bytes, training.model.layers
        if not layers:
            return []
        costs = layer_bytes(layers, px, px)
        (plan,) = partition_bytes(costs, [len(layers)], 1, "never", "sgd-momentum")
        counted = training.peak(Way("off")) + (0 if place.cuda else fixed)
        rows.append({
            "side": px,
            "planned_mib": plan.total / 2**20,
            "counted_mib": counted / 2**20,
            "ratio": plan.total / counted,
            "ratio_of_maps": (plan.total - fixed) / (counted - fixed),
        })  # fmt: skip
    return rows


def network(name: str, place: Place, quick: bool) -> Figures:
    """All figures of a network."""
    kind, at_least_s = KINDS[name], 0.5 if quick else 4.0
    same = equal_gradients(kind, place)
    sides, batches = sizes(kind, place, with_batches=not quick or name in QUICK)
    ends = sides["off"].size
    return {
        "same_bits": same,
        "sides": {mode: asdict(found) for mode, found in sides.items()},
        "batches": {mode: asdict(found) for mode, found in batches.items()},
        "pixels_over_off": {
            mode: (found.size / ends) ** kind.dimensions for mode, found in sides.items()
        },
        "batch_over_off": {
            mode: found.size / batches["off"].size for mode, found in batches.items()
        },
        "articles": kind.articles,
        "planned": planned(kind, place, ends),
        "forced": forced(kind, place, ends, at_least_s),
        "speeds": speeds(kind, place, sides, SHARES[1::2] if quick else SHARES, at_least_s),
    }


def claims(figures: dict[str, Figures]) -> list[Claim]:
    """What the figures should say."""
    # Some of a GPU's operations do not give the same bits twice, whatever is swapped.
    judged = [row["same_bits"] for row in figures.values() if row["same_bits"]["again"]]
    same = sum(all(row.values()) for row in judged)
    made = [at_least("networks whose gradients are the same bits in all ways", same, len(judged))]
    for name, row in figures.items():
        made += [replace(one, claim=f"{name}: {one.claim}") for one in _claims(row)]
    return made


def _claims(row: Figures) -> list[Claim]:
    """Of one network."""
    pixels, batches = row["pixels_over_off"], row["batch_over_off"]
    seconds = {(one["side"], one["mode"]): one["seconds"] for one in row["speeds"]}
    times = {one["side"]: one["pixels_over_off"] for one in row["speeds"]}
    articles = f"; IBM's articles {row['articles']:.1f}" if row["articles"] else ""
    made = [
        at_least(
            f"pixels that auto trains over off (checkpointing {pixels['checkpointing']:.2f}, swap "
            f"{pixels['swap']:.2f}{articles})",
            pixels["auto"],
            PIXELS,
        )
    ]
    if row["planned"]:
        worst = max(row["planned"], key=lambda one: abs(one["ratio"] - 1))
        made.append(at_most(
            f"error of the bytes planned, {worst['planned_mib']:.0f} MiB, counted "
            f"{worst['counted_mib']:.0f} MiB at {worst['side']} px (of maps alone: "
            f"{abs(worst['ratio_of_maps'] - 1):.3f})", abs(worst["ratio"] - 1), 0.05,
        ))  # fmt: skip
    if batches:
        made.append(at_least(
            f"images that auto trains over off at its largest side (checkpointing "
            f"{batches['checkpointing']:.0f}, swap {batches['swap']:.0f}; IBM's DeepLabv3+ 5)",
            batches["auto"],
            PIXELS,
        ))  # fmt: skip
    fits = row["sides"]["off"]["size"]
    enough = [side for side, mode in seconds if mode == "auto" and times[side] >= PIXELS]
    side = min(enough, default=max(side for side, mode in seconds if mode == "auto"))
    per_pixel = seconds[side, "auto"] / times[side] / seconds[fits, "off"]
    made.append(
        at_most(f"time per pixel with auto at {times[side]:.1f} times the pixels over off at the "
                "largest that fits", per_pixel, 1.3)
    )  # fmt: skip
    if (side, "off") in seconds:
        made.append(
            at_most("the same over off at that size, as if there were no limit",
                    seconds[side, "auto"] / seconds[side, "off"], 1.3)
        )  # fmt: skip
    made.append(
        at_most("time with everything swapped over off, at a size that fits (another study of "
                "IBM's: 1.30 to 1.43 over NVLink 2, 1.73 to 2.06 over PCIe 3)",
                row["forced"]["forced_over_off"], 1.43)
    )  # fmt: skip
    return made


def _installed(name: str) -> bool:
    package = KINDS[name].package
    return not package or find_spec(package) is not None


def place_of(
    device: torch.device, limit_gib: float, width: int, quick: bool, most_bytes: float = inf
) -> Place:
    """Where, from the options, of which 0 is none; without a limit a GPU gets at most so much."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    host = min(free, machine("local").host_bytes) * 3 // 4  # a container may have less
    limit = int(limit_gib * 2**30)
    if device.type != "cuda":
        limit = limit or (20 if quick else 64) << 20
        return Place(device, limit, host, width or (8 if quick else 12))
    total = torch.cuda.get_device_properties(device).total_memory
    # What is swapped out is several times as large, and must fit the host.
    limit = min(total, limit or int(min(most_bytes, host // (2 * PIXELS))))
    torch.cuda.set_per_process_memory_fraction(limit / total, device)
    return Place(device, limit, host, width or 64)


def bench(
    quick: bool, device: str = "cpu", limit_gib: float = 0.0, width: int = 0,
    networks: tuple[str, ...] = (),
) -> Found:  # fmt: skip
    """Run all networks, or these."""
    torch.set_num_threads(1)
    place = place_of(torch.device(device), limit_gib, width, quick)
    bandwidth = measure_bandwidth(slabs_of(place), place.device)
    names = networks or (QUICK if quick else tuple(KINDS))
    missing = sorted({KINDS[name].package for name in names if not _installed(name)})
    figures = {name: network(name, place, quick) for name in names if _installed(name)}
    figures_all = {
        "device": torch.cuda.get_device_name(place.device) if place.cuda else "cpu",
        "limit_mib": place.limit_bytes / 2**20,
        "width": place.width,
        "copies_gib_per_s": bandwidth / 2**30,
        "missing": missing,
        "networks": figures,
    }
    if missing:
        print(f"not installed: {', '.join(missing)}")
    return figures_all, claims(figures)
