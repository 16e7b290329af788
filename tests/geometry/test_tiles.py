"""Tiles: own windows are a partition, read windows hold what own pixels look at."""

import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tilenet.errors import TilenetError
from tilenet.geometry.halo import input_interval
from tilenet.geometry.halo_rule import HaloRule, halo_rule
from tilenet.geometry.layers import Conv, Pool
from tilenet.geometry.maps import check_cells, output_size
from tilenet.geometry.tiles import Cut, Span, Tile, cut, owned
from tilenet.geometry.unet import PRESETS, UNetOptions, unet_layers
from tilenet.geometry.windows import Window, reflected


@cache
def exact_rule(options: UNetOptions) -> HaloRule:
    layers = unet_layers(options)
    return halo_rule("exact", layers)


SAME_RULES = st.builds(
    lambda units, unit: HaloRule(units * unit, unit),
    st.integers(0, 5),
    st.sampled_from([1, 2, 4, 16, 32]),
)
VALID_RULES = st.builds(
    lambda poolings, convolutions, kernel, upsampling: exact_rule(
        UNetOptions(poolings, convolutions, kernel=kernel, padding="valid", upsampling=upsampling)
    ),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([3, 5]),
    st.sampled_from(["nearest", "bilinear", "transposed"]),
)
PIXELS = st.integers(1, 700)
CUTS = st.one_of(
    st.just(Cut()),
    st.builds(lambda r, c: Cut(grid=(r, c)), st.integers(1, 9), st.integers(1, 9)),
    st.builds(lambda size: Cut(size_px=size), st.integers(20, 300)),
)


def possible(height: int, width: int, asked: Cut, unit: int) -> bool:
    if asked.size_px is not None:
        return asked.size_px >= unit
    rows, cols = asked.grid or (1, 1)
    return rows <= -(-height // unit) and cols <= -(-width // unit)


def check_axis(spans: tuple[Span, ...], pixels: int, unit: int) -> None:
    """The balanced rule, along one axis."""
    assert spans[0].first == 0
    assert all(a.first + a.own == b.first for a, b in pairwise(spans))
    end = spans[-1].first + spans[-1].own
    assert pixels <= end < pixels + unit
    assert all(span.first % unit == 0 and span.own % unit == 0 for span in spans)
    own = [span.own for span in spans]
    assert min(own) > 0
    assert max(own) - min(own) <= unit
    assert len({span.read for span in spans}) == 1


@given(PIXELS, PIXELS, CUTS, st.one_of(SAME_RULES, VALID_RULES))
@settings(max_examples=250)
def test_own_windows_are_a_balanced_partition_of_the_extended_raster(
    height: int, width: int, asked: Cut, rule: HaloRule
) -> None:
    unit = rule.alignment_px
    assume(possible(height, width, asked, unit))
    tiling = cut(height, width, asked, rule)
    check_axis(tiling.rows, height, unit)
    check_axis(tiling.cols, width, unit)
    if asked.grid:
        assert tiling.grid == asked.grid
    if asked.size_px:
        most = max(span.own for span in (*tiling.rows, *tiling.cols))
        assert most <= asked.size_px
    counted = np.zeros(tiling.extended, int)
    for tile in tiling.tiles:
        rows = slice(tile.own.row, tile.own.row + tile.own.height)
        counted[rows, tile.own.col : tile.own.col + tile.own.width] += 1
    assert (counted == 1).all()


@given(PIXELS, PIXELS, CUTS, SAME_RULES)
@settings(max_examples=200)
def test_read_windows_of_padded_networks_stay_inside_and_hold_the_halo(
    height: int, width: int, asked: Cut, rule: HaloRule
) -> None:
    assume(possible(height, width, asked, rule.alignment_px))
    tiling = cut(height, width, asked, rule)
    for spans, extended in zip((tiling.rows, tiling.cols), tiling.extended, strict=True):
        for span in spans:
            assert span.start % rule.alignment_px == 0
            assert span.start <= max(0, span.first - rule.halo_px)
            wanted = min(extended, span.first + span.own + rule.halo_px)
            assert wanted <= span.start + span.read <= extended
            assert span.start >= 0
    read = sum(tile.read.height * tile.read.width for tile in tiling.tiles)
    assert tiling.work_ratio == pytest.approx(read / (height * width), rel=1e-14)
    largest = max(tile.own.height * tile.own.width for tile in tiling.tiles)
    first = tiling.tiles[0].read
    expected = first.height * first.width / largest
    assert tiling.work_ratio_tile == pytest.approx(expected, rel=1e-14)


@given(PIXELS, CUTS, VALID_RULES)
@settings(max_examples=200)
def test_read_windows_of_unpadded_networks_are_the_least_legal_ones_that_give_all_own_pixels(
    pixels: int, asked: Cut, rule: HaloRule
) -> None:
    assume(possible(pixels, pixels, asked, rule.alignment_px))
    tiling = cut(pixels, pixels, asked, rule)
    layers, widest = rule.valid_layers, max(span.own for span in tiling.rows)
    for span in tiling.rows:
        assert span.start == span.first - rule.halo_px
        inset = span.first - span.start - rule.offset_px
        cells = output_size(layers, span.read, exact=True)
        assert inset + span.own <= cells
        first, last = input_interval(layers, inset, inset + span.own - 1)
        assert first >= 0, "own pixels look before the window"
        assert last < span.read, "own pixels look behind the window"
        smallest = widest + 2 * rule.halo_px
        legal = (n for n in range(smallest, span.read + 1) if output_size(layers, n, exact=True))
        assert next(legal) == span.read


@pytest.mark.parametrize(
    ("preset", "own", "read"),
    [("small", 1250, 1434), ("medium-2", 1250, 1626), ("large", 1250, 2010)],
)
def test_epsilon_cuts_the_papers_tiles_to_the_pixel(preset: str, own: int, read: int) -> None:
    options = PRESETS[preset]
    layers = unet_layers(options)
    epsilon = (read - own) // 2
    rule = halo_rule("epsilon", layers, epsilon)
    tiling = cut(10000, 10000, Cut(grid=(8, 8)), rule)
    assert {(t.own.height, t.own.width) for t in tiling.tiles} == {(own, own)}
    assert {(t.read.height, t.read.width) for t in tiling.tiles} == {(read, read)}
    assert tiling.extended == (10000, 10000)
    assert not rule.exact
    assert tiling.work_ratio_tile == pytest.approx((read / own) ** 2, rel=1e-15)


# --- refusals name the nearest legal value


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Cut(size_px=15), r"tile: 15 px, alignment: 16 px\); nearest legal tile: 16"),
        (Cut(size_px=0), "nearest legal tile: 16"),
        (Cut(size_px=-3), "nearest legal tile: 16"),
        (Cut(grid=(8, 2)), r"rows: 8 tiles over 100 px, alignment: 16 px\); at most 7 tiles"),
        (Cut(grid=(2, 14)), r"columns: 14 tiles over 200 px, alignment: 16 px\); at most 13 tiles"),
        (Cut(grid=(0, 2)), r"at least one tile a side \(rows: 0\); nearest: 1"),
        (Cut(grid=(2, -1)), r"at least one tile a side \(columns: -1\); nearest: 1"),
    ],
    ids=str,
)
def test_impossible_tiles_are_refused(asked: Cut, said: str) -> None:
    with pytest.raises(TilenetError, match=said):
        cut(100, 200, asked, HaloRule(32, 16))


def test_the_named_values_are_legal() -> None:
    rule = HaloRule(32, 16)
    assert cut(100, 200, Cut(size_px=16), rule).grid == (7, 13)
    assert cut(100, 200, Cut(grid=(7, 13)), rule).grid == (7, 13)


@pytest.mark.parametrize(("height", "width"), [(0, 5), (5, 0), (-1, 5)])
def test_an_empty_raster_is_refused(height: int, width: int) -> None:
    with pytest.raises(TilenetError, match="at least one pixel a side"):
        cut(height, width, Cut(), HaloRule(0, 1))


@pytest.mark.parametrize(("asked", "named"), [(95, (80, 96)), (1, (0, 16)), (-5, (0, 16))])
def test_a_halo_off_the_alignment_is_refused_with_its_neighbours(
    asked: int, named: tuple[int, int]
) -> None:
    layers = unet_layers(UNetOptions(poolings=4))
    with pytest.raises(TilenetError, match="multiple of the network's total stride") as raised:
        halo_rule(asked, layers, 92)
    said = re.search(r"nearest: (\d+) or (\d+),", str(raised.value))
    assert said
    assert tuple(int(number) for number in said.groups()) == named
    for legal in named:
        assert halo_rule(legal, layers, 92).halo_px == legal


def test_a_halo_of_pixels_is_exact_from_the_exact_one_on() -> None:
    layers = unet_layers(UNetOptions(poolings=4))
    rules = [halo_rule(px, layers, 92) for px in (80, 96, 112)]
    assert [rule.exact for rule in rules] == [False, True, True]
    assert {rule.alignment_px for rule in rules} == {16}


@pytest.mark.parametrize("asked", ["wide", "96px", ""])
def test_a_halo_that_is_no_number_is_refused(asked: str) -> None:
    layers = unet_layers(UNetOptions())
    with pytest.raises(TilenetError, match="exact, epsilon or a number of pixels"):
        halo_rule(asked, layers, 92)


@pytest.mark.parametrize("asked", ["epsilon", 96])
def test_an_unpadded_network_has_no_choice_of_halo(asked: int | str) -> None:
    layers = unet_layers(UNetOptions(padding="valid"))
    with pytest.raises(TilenetError, match="use halo: exact"):
        halo_rule(asked, layers, 92)


def test_a_size_that_no_window_can_have_is_refused() -> None:
    rule = replace(exact_rule(UNetOptions(poolings=4, padding="valid")), alignment_px=1)
    with pytest.raises(TilenetError, match="none from 191 to 193 px is one; use padding: same"):
        cut(7, 7, Cut(), rule)


# --- arrays


@given(st.integers(1, 9), st.integers(-40, 40), st.integers(1, 90))
def test_reflection_is_numpys_however_often_it_repeats(pixels: int, first: int, count: int) -> None:
    padded = np.pad(np.arange(pixels), 130, mode="reflect")
    assert reflected(first, count, pixels) == padded[first + 130 :][:count].tolist()


@given(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9), st.integers(0, 3))
def test_owned_cuts_the_pixels_that_a_tile_owns(
    offset: int, top: int, left: int, more: int
) -> None:
    own = Window(20, 30, 5, 7)
    read = Window(20 - top - offset, 30 - left - offset, 40, 40)
    tile = Tile(read=read, own=own)
    # an output whose cells say on which pixel of the raster they stand
    rows, cols = np.mgrid[: 5 + top + more, : 7 + left + more] + offset
    output = np.stack([rows + read.row, cols + read.col])
    expected = np.stack(np.mgrid[20:25, 30:37])
    assert np.array_equal(owned(output, tile, offset), expected)


@pytest.mark.parametrize(("rows", "legal"), [(5, True), (4, False)])
def test_reflection_needs_more_cells_than_it_pads(rows: int, legal: bool) -> None:
    layers = Pool(3, 3), Conv(3, 4, 3, padding=1, cols=(9, 1, 4), edge="reflect")
    tile = Window(0, 0, 2 * rows, 20)
    if legal:
        check_cells(layers, tile)
    else:
        with pytest.raises(TilenetError, match="8 × 20 px leave 4 × 10 cells, needed: 5"):
            check_cells(layers, tile)
