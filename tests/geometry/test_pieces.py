"""Pieces of own windows partition the extended raster."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tilenet.geometry.pieces import own_pieces
from tilenet.geometry.tiles import Cut, HaloRule, cut


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
