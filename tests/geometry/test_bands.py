"""Bands that ranks sweep: each tile once, with all that it looks at, in the strips of the image."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tilenet.geometry.bands import bands, read_ratio
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.tiles import Cut, Tiling, cut

UNIT = 8


@st.composite
def tilings(draw: st.DrawFn) -> Tiling:
    height, width = (draw(st.integers(1, 40)) * UNIT - draw(st.integers(0, 7)) for _ in range(2))
    units = -(-height // UNIT), -(-width // UNIT)
    grid = draw(st.integers(1, units[0])), draw(st.integers(1, min(units[1], 4)))
    return cut(height, width, Cut(grid=grid), HaloRule(draw(st.integers(0, 12)) * UNIT, UNIT))


@given(tilings(), st.integers(1, 7), st.data())
@settings(max_examples=200)
def test_each_tile_once_with_its_halo(tiling: Tiling, parts: int, data: st.DataObject) -> None:
    count, halo_px = len(tiling.tiles), tiling.rule.halo_px
    numbers = data.draw(st.lists(st.integers(0, count - 1), unique=True))
    shares = bands(tiling, numbers, parts)
    assert len(shares) == parts
    tiles = [number for share in shares for band in share for number in band.tiles]
    assert sorted(tiles) == sorted(numbers)
    counts = [sum(len(band.tiles) for band in share) for share in shares]
    assert max(counts) - min(counts) <= 1
    for band in (band for share in shares for band in share):
        part, strips = band.part, band.strips
        assert strips == tuple(span for span in tiling.rows if span in strips)
        first, last = strips[0], strips[-1]
        assert (part.row, part.row + part.height) == (first.first, last.first + last.own)
        for number in band.tiles:
            own = tiling.tiles[number].own
            # A strip more than the halo: the first computes other rows at once than elsewhere.
            assert part.row == 0 or first.first + first.own <= own.row - halo_px
            end = tiling.extended[0]
            assert part.row + part.height >= min(own.row + own.height + halo_px, end)
            read = tiling.tiles[number].read
            assert (part.col, part.width) == (read.col, read.width)


def test_one_rank_and_one_column_read_each_pixel_once() -> None:
    tiling = cut(203, 157, Cut(grid=(7, 1)), HaloRule(96, UNIT))
    assert read_ratio(tiling, 1) == 208 * 160 / (203 * 157)
    assert read_ratio(tiling, 2) > 1.2
