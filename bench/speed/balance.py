"""How even are the partitions: of hand-made balances, of others' rules, and of tilenet's?

The paper's models over the six V100 of a Summit node, float32, with tiles of 512, 1024 and 1434
pixels. Seconds come from the roofline. Activation memory is counted twice: as what autograd keeps
for backward, and as the maps that layers write, the usual estimate, to which an activation in place
and a stash add none; both without micro-batches in flight, weights and transients, which `tilenet
plan` counts.
All balances are judged by these same numbers. Printed is the largest over the mean partition;
since a layer is never split, the least possible ratio is above 1, and tilenet's is the least
possible. It takes seconds: --quick changes nothing.

`deepspeed` was written again from the description of DeepSpeed's `partition_balanced`: dynamic
programming over (layers, partitions) whose state is the smallest difference between the largest and
the smallest partition so far. That difference has no optimal substructure.
"""

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchgpipe.balance import blockpartition

from bench.report import Claim, Found, at_most
from tilenet.geometry.layers import Activation, Conv, Layer, Norm, Pool, Stash
from tilenet.geometry.maps import map_shapes
from tilenet.geometry.unet import PRESETS, unet_layers
from tilenet.planning.balance import block_seconds, check_balance, least_bytes, least_time
from tilenet.planning.machines.read import machine
from tilenet.planning.time.layer_time import LayerTime
from tilenet.planning.time.roofline import roofline

PARTITIONS = 6
TILES_PX = (512, 1024, 1434)
ITEM_BYTES = 4
INDEX_BYTES = 8

Matrix = NDArray[np.float64]
Balance = tuple[int, ...]
# made by hand for the paper's three models, on the six GPUs of a Summit node
PAPER: dict[str, Balance] = {
    "small": (14, 24, 30, 22, 12, 7),
    "medium-2": (16, 26, 38, 26, 12, 11),
    "large": (18, 30, 44, 30, 14, 13),
}


def block_partition(costs: list[float], num_partitions: int) -> Balance:
    """torchgpipe's own, by what `balance_by_time` and `balance_by_size` call."""
    return tuple(len(block) for block in blockpartition.solve(costs, num_partitions))


def even(costs: list[float], num_partitions: int) -> Balance:
    """As many layers everywhere as the number allows, the rest to the first partitions."""
    share, rest = divmod(len(costs), num_partitions)
    return tuple(share + (number < rest) for number in range(num_partitions))


def deepspeed(costs: list[float], num_partitions: int) -> Balance:
    """The smallest difference between largest and smallest partition, by DeepSpeed's recurrence."""
    n = len(costs)
    sums = np.array([0.0, *accumulate(costs)])
    largest: NDArray[np.float64] = np.full((num_partitions + 1, n + 1), np.inf)
    smallest = np.full_like(largest, np.inf)
    largest[0, 0] = -np.inf
    came_from = np.zeros(largest.shape, int)
    for number in range(1, num_partitions + 1):
        for end in range(number, n + 1):
            block = sums[end] - sums[:end]
            most = np.maximum(largest[number - 1, :end], block)
            least = np.minimum(smallest[number - 1, :end], block)
            start = int(np.where(np.isinf(most), np.inf, most - least).argmin())
            largest[number, end], smallest[number, end] = most[start], least[start]
            came_from[number, end] = start
    cuts = [n]
    for number in range(num_partitions, 0, -1):
        cuts.insert(0, int(came_from[number, cuts[0]]))
    return tuple(b - a for a, b in pairwise(cuts))


def saved_bytes(layers: tuple[Layer, ...], size_px: int) -> list[float]:
    """Bytes that each layer keeps for its backward, of one tile.

    This is what saved-tensor hooks see of plain torch layers: a norm keeps its input, an activation
    in place its output, a maximum pool of other windows than blocks its indices, and a convolution
    its input, which the activation in front of it keeps already (so only behind others it is new).
    Whole-channel dropout, concatenation and enlargement keep no map.
    """
    shapes = map_shapes(layers, size_px, size_px)
    kept = []
    for number, layer in enumerate(layers):
        before, after = (shape.num_elements for shape in shapes[number : number + 2])
        num_bytes = 0
        if isinstance(layer, (Activation, Norm)):
            num_bytes = ITEM_BYTES * after
        elif isinstance(layer, Pool) and not layer.in_blocks:
            num_bytes = INDEX_BYTES * after
        elif isinstance(layer, Conv) and not (
            number and isinstance(layers[number - 1], Activation)
        ):
            num_bytes = ITEM_BYTES * before
        kept.append(float(num_bytes))
    return kept


def written_bytes(layers: tuple[Layer, ...], size_px: int) -> list[float]:
    """Bytes of the maps that each layer writes, of one tile."""
    shapes = map_shapes(layers, size_px, size_px)[1:]
    return [
        0.0 if isinstance(layer, (Activation, Stash)) else float(ITEM_BYTES * shape.num_elements)
        for layer, shape in zip(layers, shapes, strict=True)
    ]


def uneven(blocks: Matrix, balance: Balance) -> float:
    """Largest over mean partition."""
    cuts = accumulate((0, *balance))
    return float(max(blocks[a, b] for a, b in pairwise(cuts)) / (blocks[0, -1] / len(balance)))


def row(name: str, size_px: int) -> dict[str, Any]:
    """Every balance of a model with tiles of a size."""
    layers = unet_layers(PRESETS[name])
    times = roofline(layers, size_px, size_px, "float32", machine("summit"))
    seconds = [time.forward_s + time.backward_s for time in times]
    memory, written = saved_bytes(layers, size_px), written_bytes(layers, size_px)
    time_blocks = block_seconds(times)
    byte_blocks = block_seconds([LayerTime(num_bytes, 0) for num_bytes in memory])  # sums as well
    map_blocks = block_seconds([LayerTime(num_bytes, 0) for num_bytes in written])
    balances = {
        "paper": PAPER[name],
        "torchgpipe by time": block_partition(seconds, PARTITIONS),
        "torchgpipe by memory": block_partition(memory, PARTITIONS),
        "deepspeed by time": deepspeed(seconds, PARTITIONS),
        "deepspeed by memory": deepspeed(memory, PARTITIONS),
        "torchgpipe by maps": block_partition(written, PARTITIONS),
        "deepspeed by maps": deepspeed(written, PARTITIONS),
        "even": even(seconds, PARTITIONS),
        "tilenet by time": least_time(time_blocks, PARTITIONS, byte_blocks)[0],
        "tilenet by memory": least_bytes(byte_blocks, PARTITIONS, time_blocks)[0],
        "tilenet by maps": least_bytes(map_blocks, PARTITIONS, time_blocks)[0],
    }
    for balance in balances.values():
        check_balance(balance, len(layers), PARTITIONS)
    judged = {
        rule: {
            "balance": balance,
            "time": uneven(time_blocks, balance),
            "memory": uneven(byte_blocks, balance),
            "maps": uneven(map_blocks, balance),
        }
        for rule, balance in balances.items()
    }
    return {"model": name, "tile_px": size_px, "balances": judged}


def claims_of(rows: list[dict[str, Any]]) -> list[Claim]:
    """tilenet's balances are the least of all in what they aim at, and near the mean."""
    claims = []
    for aim, goal in (("time", 1.16), ("memory", 1.10), ("maps", 1.10)):
        ours = [row["balances"][f"tilenet by {aim}"][aim] for row in rows]
        best = [
            min(other[aim] for rule, other in row["balances"].items() if "tilenet" not in rule)
            for row in rows
        ]
        ratio = max(a / b for a, b in zip(ours, best, strict=True))
        claims.append(at_most(f"{aim}: tilenet's bottleneck over the best rival's", ratio, 1.0))
        claims.append(at_most(f"{aim}: tilenet's bottleneck over the mean", max(ours), goal))
    return claims


def bench(quick: bool) -> Found:
    """All balances of all models, judged."""
    rows = [row(name, size_px) for name in PAPER for size_px in TILES_PX]
    return {"machine": "summit", "precision": "float32", "rows": rows}, claims_of(rows)
