"""Predicted bytes, and those of sweeps, against the tensors that live while real modules run."""

import random
import time
from dataclasses import replace
from itertools import accumulate, product
from typing import Literal

import numpy as np
import pytest
import torch
from networks import random_balance, random_options

from tilenet.geometry.layers import Activation, Stash
from tilenet.geometry.sweep import strip_edges
from tilenet.geometry.unet import PRESETS, UNetOptions, unet_layers
from tilenet.model.network import build_network
from tilenet.parallel.exchange.swept import Sweep, SweptPart
from tilenet.planning.memory.inference import inference_bytes
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.live import LiveBytes
from tilenet.planning.memory.partition import block_bytes, partition_bytes
from tilenet.planning.memory.sweeps.swept_maps import swept_bytes

SMALL = UNetOptions(poolings=2, base=4, bands=3, classes=5)
SHAPES = list(product((1, 3), ("same", "valid"), ("nearest", "bilinear", "transposed")))
WAYS = [
    replace(SMALL, poolings=poolings, padding=padding, upsampling=upsampling)
    for poolings, padding, upsampling in SHAPES
]
NAMES = ["-".join(str(part) for part in shape) for shape in SHAPES]


def most_bytes_alive(options: UNetOptions, height: int, width: int) -> int:
    """Of the maps that the layers make; the image is its caller's."""
    network = build_network(unet_layers(options), dtype=torch.float64).eval()
    image = torch.randn(1, options.bands, height, width, dtype=torch.float64)
    with torch.inference_mode(), LiveBytes() as live:
        network(image)
    return live.peak


@pytest.mark.parametrize("options", WAYS, ids=NAMES)
@pytest.mark.parametrize(("height", "width"), [(104, 120), (136, 248)])
def test_inference_takes_the_bytes_of_the_maps_that_live_at_one_time(
    options: UNetOptions, height: int, width: int
) -> None:
    layers = unet_layers(options)
    predicted = inference_bytes(layers, height, width, 8)
    measured = most_bytes_alive(options, height, width)
    if options.padding == "same":
        assert predicted == measured
    else:  # a stash counts its map as input, output and skip, which matters where it is the largest
        assert measured <= predicted <= 2 * measured
    assert inference_bytes(layers, height, width, 4) * 2 == predicted


@pytest.mark.parametrize("upsampling", ["nearest", "bilinear", "transposed"])
def test_inference_counts_the_copy_that_an_odd_size_costs(upsampling: str) -> None:
    options = replace(SMALL, upsampling=upsampling)
    predicted = inference_bytes(unet_layers(options), 149, 155, 8)
    assert predicted >= most_bytes_alive(options, 149, 155)


def test_many_bands_count_where_they_are_the_largest_map() -> None:
    layers = unet_layers(replace(SMALL, poolings=1, base=2, bands=64, classes=1))
    assert inference_bytes(layers, 40, 48, 8) == 8 * (64 + 2) * 40 * 48


@pytest.mark.parametrize("checkpointing", ["always", "except_last", "never"])
@pytest.mark.parametrize("seed", [0, 2, 5, 7, 10])
def test_blocks_are_the_partitions_that_could_be(
    seed: int, checkpointing: Literal["always", "except_last", "never"]
) -> None:
    draw = random.Random(seed)
    layers = unet_layers(random_options(draw, classes=draw.randint(1, 6)))
    precision = draw.choice(["float32", "bfloat16", "float64"])
    costs = layer_bytes(layers, draw.randint(33, 70), draw.randint(33, 70), precision)
    balance, many = random_balance(draw, len(layers), 5), draw.randint(1, 9)
    optimizer = draw.choice(["adamw", "sgd", "sgd-momentum"])
    sharers = draw.choice([1, 3, 7])
    job = many, checkpointing, optimizer
    parts = partition_bytes(costs, balance, *job, sharers=sharers)
    blocks = block_bytes(costs, *job, len(balance), sharers=sharers)
    edges = [0, *accumulate(balance)]
    for start, stop, part in zip(edges, edges[1:], parts, strict=False):
        block = blocks[start, stop]
        stashes = {c.layer.name for c in costs[start:stop] if isinstance(c.layer, Stash)}
        pops = {name for c in costs[start:stop] for name in c.layer.names}
        if stashes <= pops:
            assert block == part.total
        else:
            most = sum(c.output for c in costs[start:stop] if isinstance(c.layer, Stash))
            assert part.total <= block <= part.total + many * most
    assert np.isfinite(blocks).all()
    assert (blocks[np.tril_indices(len(costs) + 1)] == 0).all()


def test_more_micro_batches_cost_their_inputs_only_where_they_are_checkpointed() -> None:
    costs = layer_bytes(unet_layers(replace(SMALL, norm="batch")), 64, 80)
    balance = [8, 9, len(costs) - 17]
    growth = {
        mode: [
            more.total - few.total
            for few, more in zip(
                partition_bytes(costs, balance, 9, mode),
                partition_bytes(costs, balance, 10, mode),
                strict=True,
            )
        ]
        for mode in ("always", "never")
    }
    assert growth["always"][0] == 4 * 3 * 64 * 80
    assert growth["always"][1] == costs[8].input
    assert all(a < b for a, b in zip(growth["always"], growth["never"], strict=True))


def test_parameters_gradients_and_states_are_counted() -> None:
    layers = unet_layers(replace(SMALL, norm="batch"))
    costs = layer_bytes(layers, 32, 48)
    parameters = 4 * sum(layer.num_parameters for layer in layers)
    for optimizer, states in (("sgd", 0), ("sgd-momentum", 1), ("adamw", 2)):
        parts = partition_bytes(costs, [7, len(layers) - 7], 3, "always", optimizer)
        assert sum(part.gradients for part in parts) == parameters
        assert sum(part.optimizer for part in parts) == states * parameters
        statistics = sum(part.parameters for part in parts) - parameters
        assert statistics == sum(8 * c.layer.out_channels + 8 for c in costs if c.buffers)


def test_a_partition_that_begins_with_an_activation_needs_a_map_more() -> None:
    costs = layer_bytes(unet_layers(replace(SMALL, norm="batch")), 64, 80)
    first = next(i for i, cost in enumerate(costs) if isinstance(cost.layer, Activation))
    with_copy = block_bytes(costs, 1, "always")[first, first + 4]
    in_place = [replace(cost, first=None) for cost in costs]
    assert with_copy - block_bytes(in_place, 1, "always")[first, first + 4] >= costs[first].output


def test_the_largest_presets_blocks_take_a_moment() -> None:
    costs = layer_bytes(unet_layers(PRESETS["large"]), 1434, 1434)
    began = time.process_time()
    blocks = block_bytes(costs, 6, "always", num_partitions=6)
    assert time.process_time() - began < 1  # 0.03 s on a quiet machine
    assert blocks.shape == (150, 150)


SWEPT = UNetOptions(poolings=3, base=8, bands=4, classes=5, norm="batch")


@pytest.mark.parametrize(
    ("upsampling", "strip_rows"),
    [("nearest", 64), ("bilinear", 16), ("transposed", 40), ("bilinear", 64)],
)
def test_a_sweep_takes_what_was_predicted(upsampling: str, strip_rows: int) -> None:
    layers = unet_layers(replace(SWEPT, upsampling=upsampling))
    network, edges = build_network(layers).eval(), strip_edges(512, strip_rows)
    sweep, done = Sweep(layers, network, SweptPart((512, 256), edges)), 0
    with torch.inference_mode(), LiveBytes() as live:
        for first in range(0, 2 * 512, strip_rows):
            rows = min(strip_rows, 512 - first)
            done += sweep.feed(torch.randn(1, 4, rows, 256) if rows > 0 else None).shape[2]
            if done == 512:
                break
    assert done == 512
    assert 0.98 * live.peak <= swept_bytes(layers, 512, 256, strip_rows, 4) <= live.peak


def test_a_sweep_of_a_tall_image_takes_no_more() -> None:
    layers = unet_layers(SWEPT)
    assert swept_bytes(layers, 512, 256, 64, 4) == swept_bytes(layers, 1 << 16, 256, 64, 4)
