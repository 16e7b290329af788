"""Shares of maps: each cell has one owner, and what one rank takes the other gives.

All of it against sets of cells: what a rank needs is what `Layer.needs` says of its output, and
whatever of that it does not own comes from the owners, or lies outside of the map.
"""

from itertools import pairwise, product
from math import floor
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilenet.errors import TilenetError
from tilenet.geometry.grid import Grid
from tilenet.geometry.halo import context_of
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.layers import Conv, Join, Layer, Pool, Stash, TransposedConv, Upsample
from tilenet.geometry.ownership import (
    AxisShares,
    LayerHalo,
    axis_shares,
    check_shares,
    halo_of,
    own_edges,
)
from tilenet.geometry.tiles import Cut, Span, cut
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.geometry.windows import Window

LAYERS: tuple[Layer, ...] = (
    Conv(1, 1, padding=1),
    Conv(1, 1, kernel=5, dilation=2, padding=4),
    Conv(1, 1, kernel=1, stride=2),
    Conv(1, 1, stride=2, padding=1),
    Conv(1, 1, kernel=4, stride=2, padding=1),
    Conv(1, 1, kernel=5),
    Conv(1, 1, kernel=3, padding=3),
    Pool(1, 1),
    Pool(1, 1, kernel=3, stride=2, padding=1),
    Pool(1, 1, kernel=3, stride=1, padding=1, mode="average"),
    Upsample(1, 1),
    Upsample(1, 1, mode="bilinear"),
    Upsample(1, 1, factor=3, mode="bilinear"),
    Upsample(1, 1, factor=3, mode="bicubic"),
    TransposedConv(1, 1),
    TransposedConv(1, 1, 3, 2, 1, 1),
    TransposedConv(1, 1, 4, 2, 1),
)
ONE_SIDED = Conv(1, 1, kernel=2, padding=0)  # looks behind only
Cells = set[tuple[int, int]]


def cells_of(window: Window) -> Cells:
    rows = range(window.row, window.row + window.height)
    return set(product(rows, range(window.col, window.col + window.width)))


@st.composite
def axes(draw: st.DrawFn) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    """Some layers, and uneven edges between ranks, with at least 24 px each."""
    layers = tuple(draw(st.lists(st.sampled_from(LAYERS), min_size=1, max_size=4)))
    parts = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(24, 60), min_size=parts, max_size=parts))
    return layers, tuple(sum(sizes[:part]) for part in range(parts + 1))


@given(axes())
def test_each_cell_of_each_map_has_one_owner(
    case: tuple[tuple[Layer, ...], tuple[int, ...]],
) -> None:
    layers, edges_px = case
    cells, grid = edges_px[-1], Grid()
    for layer, one in zip(layers, axis_shares(layers, cells, edges_px), strict=True):
        assert (one.edges[0], one.edges[-1]) == (0, one.cells)
        assert all(a <= b for a, b in pairwise(one.edges))
        assert (one.cells, one.stride) == (cells, grid.stride)
        cells, grid = layer.size(cells), layer.grid(grid)
        assert (one.out_edges[0], one.out_edges[-1]) == (0, cells)
        # It is the rank that owns the first pixel that the cell stands for.
        for rank, (first, stop) in enumerate(pairwise(one.out_edges)):
            for cell in range(first, stop):
                pixel = floor(grid.origin + cell * grid.stride)
                pixel = min(max(pixel, 0), edges_px[-1] - 1)
                assert edges_px[rank] <= pixel < edges_px[rank + 1]


@given(axes())
def test_maps_of_one_grid_are_shared_out_alike(
    case: tuple[tuple[Layer, ...], tuple[int, ...]],
) -> None:
    _, edges_px = case
    cells = edges_px[-1]
    there_and_back = Pool(1, 1), TransposedConv(1, 1), Conv(1, 1, padding=1)
    if cells % 2 == 0:
        shares = axis_shares(there_and_back, cells, edges_px)
        assert shares[-1].out_edges == edges_px == own_edges(Grid(), cells, edges_px)


@given(axes())
def test_needs_are_what_the_layer_says(case: tuple[tuple[Layer, ...], tuple[int, ...]]) -> None:
    layers, edges_px = case
    for layer, one in zip(layers, axis_shares(layers, edges_px[-1], edges_px), strict=True):
        for rank, (first, stop) in enumerate(pairwise(one.out_edges)):
            each = [layer.needs(cell, cell) for cell in range(first, stop)]
            if each:
                wanted = min(low for low, _ in each), max(high for _, high in each) + 1
                assert one.needs[rank] == wanted
            low, high = one.inside(rank)
            assert low >= 0
            assert high <= one.cells


def random_halos(seed: int) -> tuple[AxisShares, AxisShares, list[LayerHalo]]:
    """Of one layer on a random uneven grid, all ranks'."""
    random = Random(seed)
    layer = random.choice((*LAYERS, ONE_SIDED))
    both = []
    for _ in range(2):
        sizes = [random.randint(10, 19) for _ in range(random.randint(1, 4))]
        edges = tuple(sum(sizes[:part]) for part in range(len(sizes) + 1))
        both.append(axis_shares((layer,), edges[-1], edges)[0])
    rows, cols = both
    places = product(range(len(rows.needs)), range(len(cols.needs)))
    return rows, cols, [halo_of(rows, cols, place) for place in places]


@pytest.mark.parametrize("seed", range(150))
def test_halos_against_sets_of_cells(seed: int) -> None:
    rows, cols, halos = random_halos(seed)
    everything = set(product(range(rows.cells), range(cols.cells)))
    owners = {cell: rank for rank, halo in enumerate(halos) for cell in cells_of(halo.own)}
    assert sum(len(cells_of(halo.own)) for halo in halos) == len(owners)
    assert set(owners) == everything
    outs = [cells_of(halo.out) for halo in halos]
    assert len(set().union(*outs)) == sum(map(len, outs)) == rows.out_edges[-1] * cols.out_edges[-1]
    for rank, halo in enumerate(halos):
        row, col = divmod(rank, len(cols.needs))
        looked_at = set(product(range(*rows.needs[row]), range(*cols.needs[col])))
        need, own = cells_of(halo.need), cells_of(halo.own)
        assert need == looked_at & everything
        top, bottom, left, right = halo.border
        with_border = Window(
            halo.need.row - top,
            halo.need.col - left,
            top + halo.need.height + bottom,
            left + halo.need.width + right,
        )
        assert cells_of(with_border) == looked_at
        # Gather the whole map and cut: what is not its own comes from the owner, once.
        taken = [(owner, cell) for owner, window in halo.takes for cell in cells_of(window)]
        assert sorted(taken) == sorted((owners[cell], cell) for cell in need - own)
        assert rank not in dict(halo.takes)
        assert [owner for owner, _ in halo.takes] == sorted({owner for owner, _ in halo.takes})
    takes = [(rank, *one) for rank, halo in enumerate(halos) for one in halo.takes]
    gives = [(to, rank, window) for rank, halo in enumerate(halos) for to, window in halo.gives]
    assert len(takes) == len(gives) == len(set(takes))
    assert set(takes) == set(gives)


def within_reach(layers: tuple[Layer, ...], spans: tuple[Span, ...]) -> tuple[bool, bool]:
    """Whether each rank finds all that it needs with its next neighbours.

    And whether each owns as much as the widest halo, as `convolve` asks, which adds a halo's part
    to that many of the outermost cells.
    """
    edges = (*(span.first for span in spans), spans[-1].first + spans[-1].own)
    found = wide = True
    for one in axis_shares(layers, edges[-1], edges):
        halos = []
        for rank in range(len(spans)):
            first, stop = one.inside(rank)
            low, high = one.edges[max(rank - 1, 0)], one.edges[min(rank + 2, len(spans))]
            found = found and first >= low and stop <= high
            first, stop = one.needs[rank]
            halos += [one.edges[rank] - first] if rank > 0 else []
            halos += [stop - one.edges[rank + 1]] if rank < len(spans) - 1 else []
        wide = wide and min(b - a for a, b in pairwise(one.edges)) >= max(halos, default=0)
    return found, wide


NETWORKS = [
    UNetOptions(poolings=1, convolutions=1, base=2),
    UNetOptions(poolings=2, convolutions=2, base=2, kernel=5),
    UNetOptions(poolings=3, convolutions=1, base=2, kernel=7, upsampling="bilinear"),
    UNetOptions(poolings=1, convolutions=1, base=2, kernel=13),
    UNetOptions(poolings=2, convolutions=1, base=2, kernel=11, upsampling="transposed"),
]


@pytest.mark.parametrize("options", NETWORKS, ids=lambda o: f"P{o.poolings} k{o.kernel}")
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_what_is_refused_cannot_work_and_what_is_named_can(
    options: UNetOptions, parts: int
) -> None:
    layers = unet_layers(options)
    unit = context_of(layers).alignment_px
    refused = 0
    for units in range(parts, 8 * parts + 3):
        rule = HaloRule(0, unit, exchanged=True)
        tiling = cut(units * unit - unit // 3, 7, Cut(grid=(parts, 1)), rule)
        found, works = within_reach(layers, tiling.rows)
        try:
            check_shares(layers, tiling.rows, "rows")
        except TilenetError as error:
            assert not works, "refused, but it would have worked"
            refused += 1
            words = str(error)
            least = int(words.split("the smallest legal tile is ")[1].split(" px")[0])
            most = int(words.split("use at most ")[1].split(" ranks")[0])
            assert f"rows: {parts} ranks, the narrowest owns {units // parts * unit} px" in words
            assert least % unit == 0
            # Followed, the remedy works, and neither more ranks nor smaller tiles do.
            rows = cut(units * unit, 7, Cut(grid=(most, 1)), rule).rows
            check_shares(layers, rows, "rows")
            if most < parts:
                more = cut(units * unit, 7, Cut(grid=(most + 1, 1)), rule).rows
                with pytest.raises(TilenetError, match="smallest legal tile"):
                    check_shares(layers, more, "rows")
            even = cut(least * parts, 7, Cut(grid=(parts, 1)), rule).rows
            check_shares(layers, even, "rows")
            smaller = cut((least - unit) * parts, 7, Cut(grid=(parts, 1)), rule).rows
            with pytest.raises(TilenetError, match=f"smallest legal tile is {least} px"):
                check_shares(layers, smaller, "rows")
        else:
            assert works, "allowed, but a share is narrower than a halo"
            assert found, "allowed, but a halo lies beyond the neighbour"
    wide = options.kernel // 2 > 1
    assert (refused > 0) == (parts > 1 and wide)


def test_the_layer_with_the_widest_halo_is_named() -> None:
    # The deepest convolutions look 6 cells of 2 px around them: index 6 with its pool before.
    layers = unet_layers(UNetOptions(poolings=1, convolutions=1, base=2, kernel=13))
    tiling = cut(40, 7, Cut(grid=(4, 1)), HaloRule(0, 2, exchanged=True))
    deepest = next(i for i, one in enumerate(layers) if isinstance(one, Pool)) + 1
    with pytest.raises(TilenetError) as caught:
        check_shares(layers, tiling.rows, "rows")
    assert str(caught.value) == (
        "a rank must own at least what its neighbours' halos take from it (rows: 4 ranks, the "
        f"narrowest owns 10 px, layer {deepest}, a conv with a halo of 6 cells takes 12 px); the "
        "smallest legal tile is 12 px: use at most 3 ranks along it, or halo_mode: overlap"
    )


def test_a_skip_is_shared_out_as_the_map_that_it_joins() -> None:
    skip = Stash(1, 1, name="a"), Conv(1, 1, padding=1), Join(1, 2, ("a",))
    shares = axis_shares(skip, 20, (0, 7, 20))
    assert shares[0].edges == shares[2].edges == (0, 7, 20)
    smaller = Stash(1, 1, name="a"), Conv(1, 1), Join(1, 2, ("a",))
    with pytest.raises(TilenetError) as caught:
        axis_shares(smaller, 20, (0, 7, 20))
    assert "a skip must be shared out as the map that it joins (a: cells end at" in str(
        caught.value
    )
    assert "(0, 7, 20) and (0, 7, 18)" in str(caught.value)
    assert str(caught.value).endswith("use halo_mode: overlap")
