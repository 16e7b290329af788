"""What layers say of themselves, against the torch modules that they are built as."""

import json
from dataclasses import fields, replace
from fractions import Fraction
from typing import Literal, get_args, get_origin

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from probe import looks_at, positive_network

from tilenet.errors import TilenetError
from tilenet.geometry.coordinates import Coordinates
from tilenet.geometry.grid import Grid
from tilenet.geometry.layers import (
    Activation,
    Cellwise,
    Conv,
    Dropout,
    Expand,
    GlobalPool,
    Join,
    Layer,
    Norm,
    Pool,
    Stash,
    TransposedConv,
    Upsample,
)
from tilenet.geometry.legal_layers import check_layers
from tilenet.geometry.opaque import Opaque
from tilenet.model.network import build_network
from tilenet.storage.layer_json import KINDS, layer_from_json, layer_to_json


@st.composite
def convolutions(draw: st.DrawFn) -> Layer:
    kernel, stride, dilation = (draw(st.integers(1, top)) for top in (5, 4, 3))
    padding, bias, extra = draw(st.integers(0, 4)), draw(st.booleans()), draw(st.integers(0, 3))
    return Conv(1, 1, kernel, stride, dilation, padding, bias, extra=extra)


@st.composite
def pools(draw: st.DrawFn) -> Layer:
    kernel = draw(st.integers(1, 4))
    modes: tuple[Literal["max", "average"], ...] = ("max", "average")
    mode = draw(st.sampled_from(modes))
    stride, padding = draw(st.integers(1, 4)), draw(st.integers(0, kernel // 2))
    return Pool(1, 1, kernel, stride, padding, mode, draw(st.integers(0, kernel - 1)))


@st.composite
def transposed(draw: st.DrawFn) -> Layer:
    kernel, stride = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    padding, more = draw(st.integers(0, kernel - 1)), draw(st.integers(0, stride - 1))
    return TransposedConv(1, 1, kernel, stride, padding, more, draw(st.booleans()))


@st.composite
def enlargements(draw: st.DrawFn) -> Layer:
    mode, factor = (
        draw(st.sampled_from(["nearest", "bilinear", "bicubic"])),
        draw(st.integers(1, 4)),
    )
    if mode == "bicubic":  # by odd numbers see test_needs.py
        factor += factor % 2
    return Upsample(1, 1, factor, mode)


NAMED = [
    Conv(1, 1, 3, 2, 1, 1),
    Conv(1, 1, 3, 1, 4, 0),
    TransposedConv(1, 1),
    TransposedConv(1, 1, 3, 2, 1, 1),
    TransposedConv(1, 1, 4, 2, 1),
    Pool(1, 1),
    Pool(1, 1, 3, 2, 1),
    Pool(1, 1, 3, 1, 1, "average"),
    Pool(1, 1, 3, 2, extra=1),
    Conv(1, 1, 3, 2, extra=1),
    Conv(1, 1, 2, extra=1),
    Upsample(1, 1, 2, "bilinear"),
    Upsample(1, 1, 3, "bilinear"),
    Upsample(1, 1, 3, "nearest"),
]
SHRINKING = st.one_of(convolutions(), pools())
GROWING = st.one_of(transposed(), enlargements())
SPATIAL = st.one_of(SHRINKING, GROWING, st.sampled_from(NAMED))
# torch computes places in floating point, so a weight of 0 may come out as 1e-17
ROUNDING = 1e-12


def sizes_of(layer: Layer, rows: int, cols: int) -> tuple[int, int]:
    """Rows and columns that come out of the real module."""
    torch.manual_seed(rows * 100 + cols)
    out = positive_network((layer,))(torch.randn(1, 1, rows, cols, dtype=torch.float64))
    return out.shape[2], out.shape[3]


@given(SPATIAL, st.integers(1, 23), st.integers(1, 23))
@settings(max_examples=400)
def test_size_is_the_modules_output_size_or_none_where_it_refuses_the_input(
    layer: Layer, rows: int, cols: int
) -> None:
    if layer.size(rows) > 0 and layer.size(cols) > 0:
        assert sizes_of(layer, rows, cols) == (layer.size(rows), layer.size(cols))
    else:
        with pytest.raises(RuntimeError):
            sizes_of(layer, rows, cols)


@given(SHRINKING, st.integers(2, 30))
@settings(max_examples=150)
def test_a_layer_divides_a_size_when_one_cell_less_loses_an_output_cell(
    layer: Layer, cells: int
) -> None:
    assume(layer.size(cells - 1) > 0)
    loses = sizes_of(layer, cells - 1, cells - 1) < sizes_of(layer, cells, cells)
    assert layer.divides(cells) == loses


@given(SPATIAL, st.integers(-4, 4), st.integers(0, 5))
@settings(max_examples=300)
def test_needs_is_as_far_as_gradients_reach(layer: Layer, place: int, more: int) -> None:
    pixels = 121
    first = layer.size(pixels) // 2 + place  # in the middle, where no window meets an edge
    (found,), _ = looks_at((layer,), pixels, [(first, first + more)], ROUNDING)
    start, end = layer.needs(first, first + more)
    assert found == ((start, end) if start <= end else None)


@given(SPATIAL, st.integers(10, 40))
@settings(max_examples=400)
def test_a_map_stands_in_the_middle_of_the_image(layer: Layer, cells: int) -> None:
    grid = layer.grid(Grid())
    pixels = cells * int(max(grid.stride, 1))
    after = layer.size(pixels) * grid.stride
    assert grid.origin == (pixels - after) / 2


def test_layers_that_lose_a_cell_and_give_it_back_keep_its_place() -> None:
    lost = Conv(1, 1, extra=1).grid(Grid())
    assert lost == Grid(origin=Fraction(1, 2))
    assert Conv(1, 1, padding=1, extra=1).grid(lost) == Grid()


@pytest.mark.parametrize("edges", [(0, 8), (5, 5), (3, 11)])
def test_cells_of_pixels_are_those_whose_first_pixel_they_hold(edges: tuple[int, int]) -> None:
    for stride, origin in ((2, 0), (2, 1), (4, -1), (3, Fraction(1, 2))):
        grid = Grid(Fraction(stride), Fraction(origin))
        held = [i for i in range(-9, 20) if edges[0] <= origin + i * stride < edges[1]]
        first, last = grid.cells(*edges)
        assert list(range(first, last + 1)) == held


@given(SPATIAL, st.fractions(1, 64, max_denominator=8), st.fractions(-9, 9, max_denominator=8))
@settings(max_examples=100)
def test_grids_compose(layer: Layer, stride: Fraction, origin: Fraction) -> None:
    alone, behind = layer.grid(Grid()), layer.grid(Grid(stride, origin))
    assert behind == Grid(stride * alone.stride, origin + stride * alone.origin)


MAP = "value", 0
CELLS = ("size", 1, "H"), ("size", 1, "W")
OF_LISTS = set(KINDS.values()) - {Opaque}  # nobody knows what that does to the grid
KERNEL = "w0", (4, 6, 3, 3), True
ONE_OF_EACH = [
    Conv(6, 4, 5, 2, 3, 1, bias=True),
    Conv(6, 4),
    Conv(6, 4, groups=2, extra=1),
    Conv(6, 4, 1, cols=(5, 2, 4)),
    Conv(6, 4, padding=1, edge="replicate"),
    Conv(6, 4, padding=1, edge="reflect"),
    Conv(6, 4, weights=(KERNEL,), steps=(("mul.Tensor", ("value", 0), 2.0),)),
    TransposedConv(6, 4, groups=2),
    TransposedConv(6, 4, 3, 2, 1, 1, bias=True),
    TransposedConv(6, 4),
    Pool(6, 6, 3, 2, 1, "average"),
    Pool(6, 6, 3, 2, 1, "average", counts_padding=False),
    Pool(6, 6, 3, 3, mode="corners"),
    Upsample(12, 3, 2, "shuffle"),
    GlobalPool(6, 6, takes="sum"),
    GlobalPool(6, 6, takes="maximum"),
    GlobalPool(6, 6, takes="maximum", shared=True),
    Upsample(6, 6, 3, "bilinear"),
    Upsample(6, 6, 3, "bicubic"),
    Norm(6, 6, "instance", "tile"),
    Norm(6, 6, "group", "image", 3, affine=True),
    Norm(6, 6, "batch", affine=True),
    Norm(6, 6, "batch", "frozen", affine=True, epsilon=1e-3),
    Cellwise(6, 6, steps=(("silu.default", ("value", 0)),)),
    Cellwise(6, 6, weights=(("w0", (6, 1, 1), True),), steps=(("mul.Tensor", MAP, ("value", 1)),)),
    Cellwise(
        6,
        3,
        ("a", "b"),
        1,
        (3, 6),
        (2,),
        (("w0", (3,), True), ("w1", (1, 4), False)),
        (
            ("chunk.default", ("value", 1), 2, 1),
            ("item", ("value", 5), 1),
            ("reshape.default", ("value", 6), ("list", ("size", 1, "B"), 3, ("size", 1, "HW"))),
            ("reshape.default", ("value", 7), ("list", ("size", 1, "B"), 3, *CELLS)),
            ("add.Tensor", ("value", 0), ("value", 8), ("named", "alpha", 0.5)),
        ),
    ),
    Pool(6, 6, 3, 2, extra=1),
    Upsample(6, 6, 2, "bilinear", corners=True),
    Dropout(6, 6, 0.25, "cells"),
    GlobalPool(6, 6, 3),
    Expand(6, 6, "a"),
    Dropout(6, 6, 0.25),
    Activation(6, 6, 0.2),
    Stash(6, 6, "a"),
    Stash(6, 6, "a", sizes=True),
    Join(6, 12, ("a",), fit="crop"),
    Join(6, 6, ("a", "b"), "multiply", 1),
    Join(6, 24, ("a", "b", "c"), "concatenate", 2),
    Join(6, 12, ("a",), place=1),
    Join(6, 12, ("a",)),
    Join(6, 6, ("a", "b"), "add", 2),
    Join(6, 4, ("a",), "take"),
    Conv(6, 6, 3, 2, 2, 1, groups=6),
    TransposedConv(6, 6, 5, 3, 1, groups=3, bias=True),
    Pool(6, 6, 2, 3),
    Upsample(6, 6, 4),
    Norm(6, 6, "batch", momentum=0.01),
    Dropout(6, 6, 0.1, "samples"),
    GlobalPool(6, 6),
    Expand(6, 6, "a", "nearest"),
    Expand(6, 6, "a", corners=True),
    Activation(6, 6, function="relu"),
    Activation(6, 6, function="relu6"),
    Coordinates(6, 2, (-1.0, 2.0, 0.0, 0.5, 0.0, 1.5)),
    Coordinates(6, 1, (0.0, 0.0, 1.0), "middles"),
    Coordinates(6, 1, (0.0, 0.5, -1.0), "edges"),
    Coordinates(6, 1, (3.0, 1.0, 1.0), "cells"),
    Coordinates(6, 1, (0.0, 1.0, 0.0), "counted", 1e-6),
]


@pytest.mark.parametrize("layer", ONE_OF_EACH, ids=repr)
def test_num_parameters_counts_the_modules_parameters(layer: Layer) -> None:
    parameters = positive_network((layer,)).parameters()
    assert layer.num_parameters == sum(parameter.numel() for parameter in parameters)


@pytest.mark.parametrize("layer", ONE_OF_EACH, ids=repr)
def test_a_layer_survives_json(layer: Layer) -> None:
    """As a text, where a tuple of names is a list."""
    found = layer_from_json(json.loads(json.dumps(layer_to_json(layer))))
    assert found == layer
    assert hash(found) == hash(layer)  # layers are keys of caches


def test_a_module_as_it_is_stands_alone_in_a_file() -> None:
    layer = Opaque(3, 4, 48, "nets:Net")
    entry = json.loads(json.dumps(layer_to_json(layer)))
    assert layer_from_json(entry) == layer
    assert (layer.step_px, layer.unit_px, Opaque(3, 4, 518, "nets:Net").unit_px) == (24, 16, 2)
    check_layers((layer,), 3, 4)
    odd = replace(layer, window_px=47)
    for wrong in ((layer, Conv(4, 4)), (Stash(3, 3, "a"), layer), (odd,)):
        with pytest.raises(TilenetError, match=r"network\.json"):
            check_layers(wrong, 3, 4)
    with pytest.raises(TilenetError, match="holds weights, not the module's code"):
        build_network((layer,))


@pytest.mark.parametrize("numbers", [(), (1.0, 2.0), (1.0, 2.0, 3.0, 4.0), (1.0, "a", 2.0)])
def test_coordinates_have_three_numbers_a_channel(numbers: tuple[float, ...]) -> None:
    check_layers((Coordinates(3, 1, (1.0, 2.0, 3.0)),), 3, 1)
    with pytest.raises(TilenetError, match="follow on one another"):
        check_layers((Coordinates(3, 1, numbers),), 3, 1)
    with pytest.raises(TilenetError, match="follow on one another"):
        check_layers((Coordinates(3, 1, (1.0, 2.0, 3.0), "edges", -1.0),), 3, 1)


def test_maxima_alone_share_gradients() -> None:
    check_layers((Conv(3, 4), GlobalPool(4, 4, takes="maximum", shared=True)), 3, 4)
    for takes in ("mean", "sum"):
        with pytest.raises(TilenetError, match="follow on one another"):
            check_layers((Conv(3, 4), GlobalPool(4, 4, takes=takes, shared=True)), 3, 4)  # type: ignore[arg-type]


def test_layers_of_older_checkpoints_are_read() -> None:
    pop = {"kind": "pop", "in_channels": 2, "out_channels": 5, "name": "skip0", "fit": "crop"}
    assert layer_from_json(pop) == Join(2, 5, ("skip0",), fit="crop")
    old = {"kind": "norm", "norm": "group", "scope": "image", "groups": 2, "affine": True}
    channels = {"in_channels": 4, "out_channels": 4}
    assert layer_from_json(old | channels) == Norm(4, 4, "group", groups=2, affine=True)


def test_every_kind_is_tried() -> None:
    assert {type(layer) for layer in ONE_OF_EACH} == OF_LISTS


@pytest.mark.parametrize("kind", sorted(OF_LISTS, key=repr), ids=lambda kind: kind.kind)
def test_every_field_is_tried_with_each_of_its_choices(kind: type[Layer]) -> None:
    """Or with other than its default: a field that JSON lost would not be seen else."""
    for field in fields(kind):
        tried = {getattr(layer, field.name) for layer in ONE_OF_EACH if type(layer) is kind}
        choices = (True, False) if field.type is bool else get_args(field.type)
        if choices and get_origin(field.type) is not tuple:
            assert tried == set(choices), field.name
        else:
            assert tried - {field.default}, field.name


@pytest.mark.parametrize("wrong", [{"kernel": 2}, {"padding": 1}, {"extra": 1}])
def test_blocks_made_one_by_corners_lie_side_by_side(wrong: dict[str, int]) -> None:
    layer = Pool(6, 6, 3, 3, mode="corners")
    check_layers((layer,), 6, 6)
    with pytest.raises(TilenetError, match=r"layers must follow on one another .*pool"):
        check_layers((replace(layer, **wrong),), 6, 6)  # type: ignore[arg-type]


@pytest.mark.parametrize("layer", ONE_OF_EACH, ids=repr)
def test_a_value_of_another_layer_is_another_json(layer: Layer) -> None:
    """No two of them are written alike."""
    written = json.dumps(layer_to_json(layer), sort_keys=True)
    others = [json.dumps(layer_to_json(one), sort_keys=True) for one in ONE_OF_EACH]
    assert others.count(written) == sum(one == layer for one in ONE_OF_EACH)


@pytest.mark.parametrize(
    "change",
    [{"kind": "attention"}, {"kind": None}, {"kernel_size": 3}, {"in_channels": ...}],
    ids=["unknown kind", "no kind", "unknown field", "missing field"],
)
def test_an_entry_that_is_no_layer_is_refused(change: dict[str, object]) -> None:
    entry = layer_to_json(Conv(2, 3)) | change
    entry = {key: value for key, value in entry.items() if value is not ...}
    rule = "must have a known kind and that kind's fields .*known kinds: conv, transposed, pool"
    with pytest.raises(TilenetError, match=rule):
        layer_from_json(entry)
