"""Seconds by the roofline, against arithmetic done by hand and against one another."""

from dataclasses import replace

import pytest

from tilenet.errors import TilenetError
from tilenet.geometry.layers import (
    Activation,
    Conv,
    Dropout,
    Join,
    Layer,
    Norm,
    Pool,
    Stash,
    TransposedConv,
    Upsample,
)
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.planning.machines.machine import Machine
from tilenet.planning.machines.read import machine
from tilenet.planning.time.roofline import ITEM_BYTES, roofline

# Peaks so far apart that either arithmetic or memory alone counts, in round numbers.
SLOW_MEMORY = replace(
    machine("summit"),
    flops=dict.fromkeys(ITEM_BYTES, 1e18),
    memory_bandwidth=1e6,
    maths_efficiency=1,
    memory_efficiency=0.5,
)
SLOW_MATHS = replace(
    SLOW_MEMORY, flops=dict.fromkeys(ITEM_BYTES, 1e6), memory_bandwidth=1e18, maths_efficiency=0.25
)
FIRST = Conv(3, 5, kernel=1)


def second_of_two(layer: Layer, facts: Machine, precision: str = "float32") -> tuple[float, float]:
    """Forward and backward of a layer that stands behind a trained one, on 7 × 9 pixels."""
    times = roofline(
        (replace(FIRST, out_channels=layer.in_channels), layer), 7, 9, precision, facts
    )
    return times[1].forward_s, times[1].backward_s


def test_a_pass_takes_at_least_its_launch() -> None:
    launched = replace(SLOW_MATHS, kernel_s=1.0)
    wide = second_of_two(Conv(500, 1100, kernel=3, padding=1), launched)
    assert wide == second_of_two(Conv(500, 1100, kernel=3, padding=1), SLOW_MATHS)
    assert second_of_two(Conv(5, 11, kernel=3, padding=1), launched) == (1, 2)
    assert second_of_two(Stash(5, 5, name="a"), launched) == (0, 0)  # which runs nothing


@pytest.mark.parametrize(
    ("layer", "cells"),
    [
        (Conv(5, 11, kernel=3, padding=1), 9 * 7 * 9),
        (Conv(5, 11, kernel=3, stride=2), 9 * 3 * 4),  # cells that come out
        (TransposedConv(5, 11, kernel=2), 4 * 7 * 9),  # cells that go in
    ],
)
def test_convolutions_are_counted_in_multiplications_and_additions(
    layer: Layer, cells: int
) -> None:
    forward, backward = second_of_two(layer, SLOW_MATHS)
    assert forward == pytest.approx(2 * 5 * 11 * cells / 0.25e6)
    assert backward == pytest.approx(2 * forward)


MAP, POOLED = 4 * 63 * 4, 4 * (2 * 3) * 4  # bytes


@pytest.mark.parametrize(
    ("layer", "forward", "backward"),
    [
        (Norm(4, 4), 3 * MAP, 5 * MAP),
        (Activation(4, 4), 2 * MAP, 3 * MAP),
        (Dropout(4, 4), 2 * MAP, 2 * MAP),
        (Stash(4, 4, name="x"), 0, 0),
        (Upsample(4, 4, factor=3), 10 * MAP, 10 * MAP),
        (Pool(4, 4, 3, 3), MAP + 3 * POOLED, MAP + 3 * POOLED),  # with indices of 8 bytes
        (Pool(4, 4, 3, 3, mode="average"), MAP + POOLED, MAP + POOLED),
        (Pool(4, 4), 2 * MAP + 2 * POOLED, 4 * MAP + 2 * POOLED),  # rows, then columns
    ],
    ids=repr,
)
def test_cheap_layers_move_whole_maps(layer: Layer, forward: int, backward: int) -> None:
    wanted = forward / 0.5e6, backward / 0.5e6
    assert second_of_two(layer, SLOW_MEMORY) == pytest.approx(wanted)
    assert max(second_of_two(layer, SLOW_MATHS)) < 1e-12


@pytest.mark.parametrize(("precision", "item_bytes"), list(ITEM_BYTES.items()))
def test_a_memory_bound_convolution_moves_both_maps_and_the_weights(
    precision: str, item_bytes: int
) -> None:
    forward, backward = second_of_two(Conv(5, 11, kernel=3, padding=1), SLOW_MEMORY, precision)
    moved = (5 * 63 + 11 * 63 + 5 * 11 * 9) * item_bytes
    assert forward == pytest.approx(moved / 0.5e6)
    assert backward == pytest.approx(2 * moved / 0.5e6)


def test_a_concatenation_reads_and_writes_both_halves() -> None:
    layers = (Conv(3, 5, kernel=1), Stash(5, 5, name="a"), Join(5, 10, ("a",)))
    times = roofline(layers, 7, 9, "float32", SLOW_MEMORY)
    assert times[2].forward_s == times[2].backward_s == pytest.approx(2 * 10 * 63 * 4 / 0.5e6)


def test_nothing_flows_back_to_the_image() -> None:
    layers = (Dropout(3, 3), Conv(3, 5), Activation(5, 5), Conv(5, 2))
    times = roofline(layers, 31, 17, "float32", machine("summit"))
    assert times[0].backward_s == 0 < times[0].forward_s
    assert times[1].backward_s == times[1].forward_s
    assert times[2].backward_s > times[2].forward_s
    assert times[3].backward_s == 2 * times[3].forward_s


def test_tensor_cores_help_where_there_is_arithmetic() -> None:
    layers = unet_layers(UNetOptions(poolings=3, norm="instance", dropout=0.1))
    single = roofline(layers, 256, 256, "float32", machine("summit"))
    half = roofline(layers, 256, 256, "float16", machine("summit"))
    for layer, slow, fast in zip(layers, single, half, strict=True):
        if isinstance(layer, Conv):
            assert 1.99 < slow.forward_s / fast.forward_s < 125 / 15.7 + 1e-9
        elif isinstance(layer, (Norm, Activation)):
            assert slow.forward_s == 2 * fast.forward_s


def test_unknown_precisions_are_refused() -> None:
    layers = unet_layers(UNetOptions())
    with pytest.raises(TilenetError, match=r"\(precision: float8\); nearest: float32"):
        roofline(layers, 64, 64, "float8", machine("summit"))
    with pytest.raises(TilenetError, match="summit has no peak for precision bfloat16"):
        roofline(layers, 64, 64, "bfloat16", machine("summit"))


def test_tiles_of_a_batch_move_their_maps_and_the_weights_once() -> None:
    layers = unet_layers(UNetOptions(poolings=1, base=4, norm="instance", upsampling="bilinear"))
    one = roofline(layers, 34, 26, "float32", SLOW_MEMORY)
    four = roofline(layers, 34, 26, "float32", SLOW_MEMORY, 4)
    for layer, alone, together in zip(layers, one, four, strict=True):
        again_s = 3 * 4 * layer.num_parameters / (1e6 * 0.5)
        assert together.forward_s == pytest.approx(4 * alone.forward_s - again_s)
    maths = [roofline(layers, 34, 26, "float32", SLOW_MATHS, tiles) for tiles in (1, 4)]
    for alone, together in zip(*maths, strict=True):
        assert together.backward_s == pytest.approx(4 * alone.backward_s)
