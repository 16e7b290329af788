"""Costs of single layers, against what is known of them, and put together against whole runs."""

import random
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from networks import Head, random_options
from torch._subclasses.fake_tensor import FakeTensorMode

from tilenet.errors import TilenetError
from tilenet.geometry.layers import Activation, Conv, Dropout, Join, Norm, Pool, Stash
from tilenet.geometry.maps import map_shapes
from tilenet.geometry.unet import PRESETS, UNetOptions, unet_layers
from tilenet.model.network import build_network
from tilenet.planning.memory.layer import cast_parameters, layer_bytes, measure, parameter_dtype
from tilenet.planning.memory.live import LiveBytes
from tilenet.planning.memory.map_limits import check_map_sizes, largest_map
from tilenet.planning.memory.partition import partition_bytes

PRECISIONS = ["float32", "float64", "bfloat16", "float16"]


def random_network(seed: int) -> tuple[UNetOptions, tuple[int, int]]:
    """Options, and a size that fits them: odd ones too, but for valid networks."""
    draw = random.Random(seed)
    options = random_options(
        draw,
        base=draw.choice([2, 4, 6, 8]),
        bands=draw.randint(1, 6),
        classes=draw.randint(1, 7),
        kernel=draw.choice([1, 3, 5]),
        padding=draw.choice(["same", "valid"]),
        groups=2,
    )
    if options.padding == "same":
        return options, (draw.randint(30, 130), draw.randint(30, 130))
    lost = (options.kernel - 1) * options.convolutions

    def side() -> int:
        size = 2 * lost + 2 * draw.randint(1, 9)
        for _ in range(options.poolings):
            size = 2 * size + lost
        return size

    return options, (side(), side())


def whole_run(options: UNetOptions, size: tuple[int, int], precision: str, batch: int) -> int:
    """Peak of forward and backward of the network as one piece; image and logits are held."""
    dtype = parameter_dtype(precision)
    mixed = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision)
    with torch.device("meta") if mixed is None else FakeTensorMode():
        network = build_network(unet_layers(options), device="cpu" if mixed else "meta")
        cast_parameters(network, dtype)
        network.mask_key.images = tuple(range(batch))
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with LiveBytes() as live:
            image = torch.randn(batch, options.bands, *size, dtype=dtype)
            with torch.autocast("cpu", mixed, enabled=mixed is not None):
                logits = network(image)
            loss = Head.apply(logits)
            loss.backward()
    return live.peak - 2 * loss.nbytes  # the loss, and its gradient


# Each kind of norm, padding and upsampling, with both kinds of precision.
@pytest.mark.parametrize("seed", [0, 1, 3, 4, 6, 7, 9, 10, 12, 13, 18])
def test_layers_put_together_give_a_whole_runs_peak_to_the_byte(seed: int) -> None:
    options, size = random_network(seed)
    precision = PRECISIONS[seed % 4]
    batch = 1 + seed // 4 % 2
    costs = layer_bytes(unet_layers(options), *size, precision, batch)
    found = partition_bytes(costs, [len(costs)], 1, "never")[0]
    predicted = found.inputs + found.activations + costs[-1].output
    assert predicted == whole_run(options, size, precision, batch)


def test_each_layer_keeps_what_its_backward_needs() -> None:
    options = UNetOptions(poolings=1, base=4, bands=3, norm="batch", dropout=0.1)
    layers = unet_layers(options)
    shapes = map_shapes(layers, 30, 46)
    for cost, before, after in zip(layer_bytes(layers, 30, 46), shapes, shapes[1:], strict=False):
        layer = cost.layer
        assert cost.input == 4 * before.num_elements
        assert cost.output == 4 * after.num_elements
        assert cost.elements == after.num_elements
        assert cost.parameters == 4 * layer.num_parameters
        assert cost.keeps_input == isinstance(layer, Conv | Norm | Pool)
        assert cost.in_place == isinstance(layer, Activation | Stash)
        assert cost.keeps_output == isinstance(layer, Activation)
        if isinstance(layer, Dropout | Norm):
            assert 0 < cost.saved <= 8 * layer.out_channels
        else:
            assert cost.saved == 0
        if isinstance(layer, Join):
            assert cost.shares_gradient
            assert cost.skip_gradients == ((cost.output, 0),)
        if isinstance(layer, Activation):
            assert cost.first is not None
            assert not cost.first.in_place
            assert cost.first.forward == cost.output


def test_only_pools_whose_windows_overlap_keep_indices() -> None:
    for pool, indices in (Pool(4, 4), 0), (Pool(4, 4, 3, 2, 1), 8), (Pool(4, 4, 3, 3), 8):
        layers = (Conv(3, 4), pool, Conv(4, 2))
        cost = layer_bytes(layers, 30, 47)[1]
        assert cost.saved == indices * cost.elements
        assert cost.keeps_input


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_costs_are_those_of_tensors_in_memory(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options, (height, width) = random_network(seed)
    layers = unet_layers(replace(options, norm=["none", "batch", "instance"][seed % 3]))  # type: ignore[arg-type]
    costs = layer_bytes(layers, height, width, "float64", 2)
    monkeypatch.setattr(torch, "device", lambda _: nullcontext())
    measure.cache_clear()
    try:
        assert layer_bytes(layers, height, width, "float64", 2) == costs
    finally:
        measure.cache_clear()


def test_writing_over_instance_norms_view_costs_backward_a_copy() -> None:
    def activation(norm: str) -> tuple[float, ...]:
        options = UNetOptions(poolings=1, base=4, norm=norm)  # type: ignore[arg-type]
        costs = layer_bytes(unet_layers(options), 32, 48)
        cost = next(cost for cost in costs if isinstance(cost.layer, Activation))
        return tuple(peak / cost.output for peak in cost.backward)

    assert activation("batch") == (1, 1, 1, 1)
    # The output's gradient is freed before the peak, unless another graph holds it.
    assert activation("instance") == (3, 3, 4, 4)


def test_an_image_wants_no_gradient() -> None:
    costs = layer_bytes(unet_layers(UNetOptions(poolings=1, base=4)), 40, 40)
    assert costs[0].gradient == 0
    assert costs[0].first is not None
    assert costs[0].first.gradient == costs[0].input  # in torchgpipe it wants one after all
    assert all(cost.gradient > 0 for cost in costs[1:])


def test_exchange_copies_only_what_is_enlarged() -> None:
    layers = unet_layers(UNetOptions(poolings=1, base=4, bands=3, upsampling="bilinear"))
    here = layer_bytes(layers, 34, 46)
    there = layer_bytes(layers, 34, 46, halo_mode="exchange")
    assert sum(layer.kind == "upsample" for layer in layers) == 1
    for layer, one, other in zip(layers, here, there, strict=True):
        assert one.output == other.output
        if layer.kind == "upsample":
            assert other.forward > one.forward
        else:
            assert replace(other, first=None) == replace(one, first=None)


@pytest.mark.parametrize(
    ("layer", "keeps"),
    [
        (Conv(4, 5, kernel=5, stride=2, padding=2), True),  # shrinks maps
        (Conv(4, 16, kernel=5, padding=2), True),  # weights outnumber cells: 4 × 16 × 25 > 34 × 46
        (Conv(4, 15, kernel=5, padding=2), False),
    ],
)
def test_exchange_keeps_a_padded_copy_of_some_inputs(layer: Conv, keeps: bool) -> None:
    """The layer, of kernel 5, keeps a copy of its input with a halo, and the one before none."""
    layers = (Conv(3, 4, padding=1), layer)
    here, there = layer_bytes(layers, 34, 46), layer_bytes(layers, 34, 46, halo_mode="exchange")
    padded = 4 * 4 * (34 + 4) * (46 + 4)
    assert replace(here[0], first=None) == replace(there[0], first=None)
    assert here[1].keeps_input
    assert there[1].keeps_input != keeps
    assert (there[1].saved == here[1].saved + padded) == keeps


def test_the_largest_preset_takes_a_moment_at_any_size() -> None:
    layers = unet_layers(PRESETS["large"])
    layer_bytes(layers, 512, 512)
    state = torch.get_rng_state()
    began = time.process_time()
    costs = layer_bytes(layers, 10_000, 10_000)
    assert time.process_time() - began < 5  # 0.4 s on a quiet machine
    assert sum(cost.parameters for cost in costs) == 4 * 1_157_578_016
    assert torch.equal(state, torch.get_rng_state())


def test_maps_of_2_to_the_31_elements_are_refused_by_layer() -> None:
    layers = unet_layers(PRESETS["small"])
    assert largest_map(layers, 100, 96) == (99, 128 * 100 * 96)
    with pytest.raises(TilenetError, match=r"layer \d+, join: .* use smaller tiles$"):
        check_map_sizes(layers, 4096, 4096)
    check_map_sizes(layers, 4095, 4096)
    with pytest.raises(TilenetError, match="use more ranks, or fewer or smaller images"):
        check_map_sizes(layers, 4095, 4096, batch=2)
    # Many bands are the input of the first layer.
    layers = unet_layers(UNetOptions(poolings=1, base=2, bands=200))
    assert largest_map(layers, 12, 14) == (0, 200 * 12 * 14)
