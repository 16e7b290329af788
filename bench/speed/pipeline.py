"""How much faster is a step over 1 to 6 devices? A simulation of torchgpipe's schedule.

The paper's models on V100 with NVLink, float32, seconds of layers by the roofline. A partition
waits for its input and for the skips that come from others; recomputation is that of torchgpipe's
default, except_last. The speed-up is over one device that computes the same micro-batches one after
another, without recomputation. The paper speaks of micro-batches per partition (mbpp): read as
micro-batches of the whole pipeline, m = mbpp; read as of each partition, m = mbpp · partitions.
Nothing here was measured on a GPU, and launching kernels costs nothing, so that tiles of 192 pixels
come out too fast on one device as well as on many. Seconds suffice: --quick changes nothing.
"""

from itertools import accumulate, pairwise
from typing import Any

from bench.report import Claim, Found, at_least
from bench.speed.balance import PAPER
from tilenet.geometry.layers import Layer, Stash
from tilenet.geometry.maps import map_shapes
from tilenet.geometry.unet import PRESETS, unet_layers
from tilenet.planning.balance import block_seconds, least_time
from tilenet.planning.machines.read import machine
from tilenet.planning.time.layer_time import LayerTime
from tilenet.planning.time.roofline import ITEM_BYTES, roofline
from tilenet.planning.time.timeline import Timeline, simulate

PRECISION = "float32"
MBPP = 2
FEW = 16
# What the paper reports: speed-ups by tile size without naming the model, and by model at 1434 px.
# How many micro-batches it ran is a matter of reading, so these are shown, never claimed.
REPORTED: dict[int, dict[str, float]] = {
    192: dict.fromkeys(PAPER, 2.8),
    512: dict.fromkeys(PAPER, 2.5),
    1024: dict.fromkeys(PAPER, 2.0),
    1434: {"small": 1.97, "medium-2": 2.01},
}


def boundary_s(
    layers: tuple[Layer, ...], size_px: int, balance: tuple[int, ...]
) -> tuple[float, ...]:
    """Seconds until a partition has its input and the skips that other partitions stashed."""
    shapes = map_shapes(layers, size_px, size_px)
    cuts = [*accumulate((0, *balance))]
    facts = machine("summit")
    stashed = {layer.name: at for at, layer in enumerate(layers) if isinstance(layer, Stash)}
    moved_s = []
    for first, stop in list(pairwise(cuts))[1:]:
        elements = shapes[first].num_elements
        for layer in layers[first:stop]:
            outside = (stashed[name] for name in layer.names if stashed[name] < first)
            elements += sum(shapes[at].num_elements for at in outside)
        moved_s.append(facts.transfer_s(elements * ITEM_BYTES[PRECISION]))
    return tuple(moved_s)


def timeline_of(
    layers: tuple[Layer, ...],
    times: tuple[LayerTime, ...],
    size_px: int,
    balance: tuple[int, ...],
    micro_batches: int,
) -> Timeline:
    """The step over these partitions."""
    blocks = [times[a:b] for a, b in pairwise(accumulate((0, *balance)))]
    return simulate(
        [sum(time.forward_s for time in block) for block in blocks],
        [sum(time.backward_s for time in block) for block in blocks],
        boundary_s(layers, size_px, balance),
        micro_batches,
        "except_last" if len(balance) > 1 else "never",
    )


def rows_of(name: str, size_px: int) -> list[dict[str, Any]]:
    """Speed-ups of a model with tiles of a size."""
    layers = unet_layers(PRESETS[name])
    facts = machine("summit")
    times = roofline(layers, size_px, size_px, PRECISION, facts)
    shapes = map_shapes(layers, size_px, size_px)
    edges_s = [facts.transfer_s(shape.num_elements * ITEM_BYTES[PRECISION]) for shape in shapes]
    blocks = block_seconds(times, edges_s)
    alone_s = sum(time.forward_s + time.backward_s for time in times)
    rows = []
    for partitions in range(1, 7):
        candidates = {"tilenet": least_time(blocks, partitions, few=FEW)}
        if partitions == len(PAPER[name]):
            candidates["paper"] = [PAPER[name]]
        for reading, m in (("in all", MBPP), ("per partition", MBPP * partitions)):
            for maker, balances in candidates.items():
                runs = {b: timeline_of(layers, times, size_px, b, m) for b in balances}
                balance = min(runs, key=lambda b: runs[b].makespan_s)
                rows.append(
                    {
                        "model": name,
                        "tile_px": size_px,
                        "balance_of": maker,
                        "partitions": partitions,
                        "reading": f"{MBPP} {reading}",
                        "micro_batches": m,
                        "balance": balance,
                        "step_s": runs[balance].makespan_s,
                        "idle": runs[balance].bubble,
                        "speedup": m * alone_s / runs[balance].makespan_s,
                        "reported": REPORTED[size_px].get(name) if partitions == 6 else None,
                    }
                )
    return rows


def claims_of(rows: list[dict[str, Any]]) -> list[Claim]:
    """tilenet's balances against the hand-made ones, with the same devices and micro-batches."""
    gains: dict[str, list[float]] = {}
    paper = {
        (row["model"], row["tile_px"], row["reading"]): row["speedup"]
        for row in rows
        if row["balance_of"] == "paper"
    }
    for row in rows:
        if row["partitions"] == 6 and row["balance_of"] == "tilenet":
            key = (row["model"], row["tile_px"], row["reading"])
            gains.setdefault(row["reading"], []).append(row["speedup"] / paper[key])
    return [
        at_least(
            f"six partitions: tilenet's speed-up over the paper's balances', m = {reading}, least",
            min(found),
            1.0,
        )
        for reading, found in gains.items()
    ]


def bench(quick: bool) -> Found:
    """Speed-ups of all models and sizes."""
    rows = [row for name in PAPER for size_px in REPORTED for row in rows_of(name, size_px)]
    figures = {
        "machine": "summit",
        "precision": PRECISION,
        "checkpointing": "except_last",
        "rows": rows,
    }
    return figures, claims_of(rows)
