"""U-Nets as lists of layers: the paper's counts, and what each option changes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilenet.errors import TilenetError
from tilenet.geometry.halo import epsilon_px
from tilenet.geometry.layers import Conv, Dropout, Join, Layer, Norm, Pool, Stash, TransposedConv
from tilenet.geometry.unet import PAPER_LEVELS, PRESETS, UNetOptions, unet_layers


@pytest.mark.parametrize(
    ("preset", "num_layers", "num_parameters", "epsilon"),
    [
        ("small", 109, 72301856, 92),
        ("medium-1", 241, 232687904, 230),
        ("medium-2", 129, 289357088, 188),
        ("large", 149, 1157578016, 380),
    ],
)
def test_presets_have_the_papers_counts_and_halos(
    preset: str, num_layers: int, num_parameters: int, epsilon: int
) -> None:
    layers = unet_layers(PRESETS[preset])
    assert len(layers) == num_layers
    assert sum(layer.num_parameters for layer in layers) == num_parameters
    assert epsilon_px(PAPER_LEVELS[preset], PRESETS[preset].convolutions) == epsilon


OPTIONS = st.builds(
    UNetOptions,
    poolings=st.integers(1, 5),
    convolutions=st.integers(1, 4),
    base=st.integers(1, 9).map(lambda half: 2 * half),
    bands=st.integers(1, 7),
    classes=st.integers(1, 7),
    kernel=st.sampled_from([1, 3, 5]),
    padding=st.sampled_from(["same", "valid"]),
    upsampling=st.sampled_from(["nearest", "bilinear", "transposed"]),
    norm=st.sampled_from(["none", "instance", "group", "batch"]),
    norm_scope=st.sampled_from(["image", "tile"]),
    groups=st.integers(1, 9),
    dropout=st.sampled_from([0.0, 0.3]),
    bias=st.sampled_from([None, True, False]),
)


def of_kind(layers: tuple[Layer, ...], kind: type[Layer]) -> list[Layer]:
    return [layer for layer in layers if isinstance(layer, kind)]


@given(OPTIONS)
def test_each_layer_takes_the_channels_that_the_one_before_gives(options: UNetOptions) -> None:
    layers = unet_layers(options)
    channels, stashed = options.bands, {}
    for layer in layers:
        assert layer.in_channels == channels, layer
        if isinstance(layer, Stash):
            assert layer.name not in stashed
            stashed[layer.name] = layer.out_channels
        wide = sum(stashed.pop(name) for name in layer.names)
        if isinstance(layer, Join):
            assert layer.out_channels == channels + wide
        elif not isinstance(layer, Conv):
            assert layer.out_channels == channels
        channels = layer.out_channels
    assert channels == options.classes
    assert not stashed


@given(OPTIONS)
def test_options_say_what_layers_there_are(options: UNetOptions) -> None:
    layers = unet_layers(options)
    cells = options.convolutions * (2 * options.poolings + 1)
    convolutions = of_kind(layers, Conv)
    assert len(convolutions) == cells + 1
    assert [c.kernel for c in convolutions] == [options.kernel] * cells + [1]
    padding = options.kernel // 2 if options.padding == "same" else 0
    assert [c.padding for c in convolutions] == [padding] * cells + [0]
    assert len(of_kind(layers, Pool)) == len(of_kind(layers, Join)) == options.poolings
    assert len(of_kind(layers, Norm)) == (0 if options.norm == "none" else cells)
    assert len(of_kind(layers, Dropout)) == (cells if options.dropout else 0)
    transposed = options.poolings if options.upsampling == "transposed" else 0
    assert len(of_kind(layers, TransposedConv)) == transposed
    bias = options.norm == "none" if options.bias is None else options.bias
    assert {c.bias for c in convolutions} == {bias}
    assert {pop.fit for pop in of_kind(layers, Join)} == {
        "crop" if options.padding == "valid" else "pad"
    }


@given(OPTIONS)
def test_widths_double_with_every_pooling(options: UNetOptions) -> None:
    layers = unet_layers(options)
    widths = [layer.in_channels for layer in of_kind(layers, Pool)]
    assert widths == [options.base * 2**level for level in range(options.poolings)]
    widest = max(layer.out_channels for layer in of_kind(layers, Conv)[:-1])
    # the bottleneck's inner convolutions work with twice the channels that it hands on
    assert widest == widths[-1] * (2 if options.convolutions > 1 else 1)


@given(OPTIONS.filter(lambda options: options.norm != "none"))
def test_norms_have_weights_and_groups_as_their_kind_does(options: UNetOptions) -> None:
    for norm in of_kind(unet_layers(options), Norm):
        assert isinstance(norm, Norm)
        assert (norm.norm, norm.scope) == (options.norm, options.norm_scope)
        assert norm.affine == (options.norm != "instance")
        fitting = [n for n in range(1, options.groups + 1) if norm.out_channels % n == 0]
        assert norm.groups == (fitting[-1] if options.norm == "group" else 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"poolings": 0}, "poolings must be at least 1"),
        ({"poolings": 11}, r"at most 10 poolings \(poolings: 11\)"),
        ({"convolutions": 0}, "convolutions must be at least 1"),
        ({"bands": 0}, "bands must be at least 1"),
        ({"classes": -1}, "classes must be at least 1"),
        ({"groups": 0}, "groups must be at least 1"),
        ({"base": 5}, "nearest: 4"),
        ({"base": 0}, "nearest: 2"),
        ({"kernel": 4}, "nearest: 5"),
        ({"kernel": -2}, "nearest: 1"),
        ({"dropout": 1.0}, "below 1"),
        ({"dropout": -0.1}, "at least 0"),
        ({"dropout": float("nan")}, "probability"),
    ],
    ids=str,
)
def test_an_impossible_shape_is_refused(change: dict[str, float], said: str) -> None:
    with pytest.raises(TilenetError, match=said):
        replace(UNetOptions(), **change)
