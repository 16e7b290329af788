"""Pieces of own windows partition the extended raster."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tilenet.data.blocks import Blocks
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.pieces import strips_of, within
from tilenet.geometry.tiles import Cut, cut, own_pieces
from tilenet.geometry.windows import Window


@given(
    st.tuples(st.integers(1, 60), st.integers(1, 60)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.integers(1, 4),
)
def test_each_pixel_is_in_one_piece_of_its_owner(
    size: tuple[int, int], grid: tuple[int, int], most: tuple[int, int], unit: int
) -> None:
    rows, cols = (min(side, -(-pixels // unit)) for side, pixels in zip(grid, size, strict=True))
    tiling = cut(*size, Cut(grid=(rows, cols)), HaloRule(0, unit, exchanged=True))
    owner = np.full(tiling.extended, -1)
    for number, tile in enumerate(tiling.tiles):
        own = tile.own
        owner[own.row : own.row + own.height, own.col : own.col + own.width] = number
    seen = np.zeros(tiling.extended, int)
    tops = []
    for number, one in own_pieces(tiling, *most):
        place = slice(one.row, one.row + one.height), slice(one.col, one.col + one.width)
        assert 1 <= one.height <= most[0]
        assert 1 <= one.width <= most[1]
        assert one.row // most[0] == (one.row + one.height - 1) // most[0]
        assert (owner[place] == number).all()
        seen[place] += 1
        tops.append(one.row)
    assert (seen == 1).all()
    assert tops == sorted(tops)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 900))
def test_strips_are_whole_rows_wherever_these_fit(height: int, width: int, most_px: int) -> None:
    window = Window(7, 3, height, width)
    seen = np.zeros((height, width), int)
    for strip in strips_of(window, most_px):
        assert strip.height * strip.width <= max(1, most_px)
        assert strip.width == width or strip.height == 1
        seen[within(strip, window)] += 1
    assert (seen == 1).all()


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1), st.integers(1, 19))
def test_blocks_partition_each_image(sizes: list[tuple[int, int]], side: int) -> None:
    blocks = Blocks(sizes, side)
    seen = [np.zeros(size, int) for size in sizes]
    places = []
    for image, one in blocks:
        assert max(one.height, one.width) <= side
        seen[image][one.row : one.row + one.height, one.col : one.col + one.width] += 1
        places.append((image, one.row, one.col))
    assert all((pixels == 1).all() for pixels in seen)
    assert places == sorted(places)
    assert len(places) == len(blocks)
