"""What the first layers of a network look at, held against gradients."""

import pytest
from probe import looks_at

from tilenet.geometry.grid import Grid
from tilenet.geometry.halo import context_of
from tilenet.geometry.layers import Activation, Conv, Join, Layer, Pool, Stash, TransposedConv
from tilenet.geometry.ownership import own_edges
from tilenet.geometry.prefix import prefix_halo_px, unjoined
from tilenet.geometry.unet import UNetOptions, unet_layers


@pytest.mark.parametrize("upsampling", ["nearest", "bilinear", "transposed"])
@pytest.mark.parametrize(("poolings", "convolutions", "kernel"), [(1, 2, 3), (3, 2, 3), (2, 3, 5)])
def test_halo_is_what_own_cells_look_at_rounded_up(
    upsampling: str, poolings: int, convolutions: int, kernel: int
) -> None:
    options = UNetOptions(
        poolings=poolings,
        convolutions=convolutions,
        kernel=kernel,
        base=2,
        bands=1,
        classes=2,
        upsampling=upsampling,
    )
    check(unet_layers(options))


def test_overlapping_pools_look_further_to_the_left() -> None:
    pool = Pool(1, 1, kernel=3, padding=1)
    larger = TransposedConv(1, 1, kernel=3, padding=1, output_padding=1)
    one = Conv(1, 1, kernel=1), Activation(1, 1)
    check((*one, pool, *one, pool, *one, larger, *one, larger, *one))


def check(layers: tuple[Layer, ...]) -> None:
    unit = context_of(layers).alignment_px
    pixels = 2 * context_of(layers).halo_px + 3 * unit
    first = context_of(layers).halo_px + unit
    for stop, layer in enumerate(layers):
        if not isinstance(layer, Activation):  # norms stand before them
            continue
        prefix = tuple(
            one for i, one in enumerate(layers[:stop]) if i not in unjoined(layers, stop)
        )
        grid = Grid()
        for one in prefix:
            grid = one.grid(grid)
        edges = own_edges(grid, int(pixels / grid.stride), (0, first, first + unit, pixels))
        (found,), _ = looks_at(prefix, pixels, [(edges[1], edges[2] - 1)])
        assert found is not None
        context = max(first - found[0], found[1] - (first + unit - 1))
        halo = prefix_halo_px(layers, stop)
        assert halo - unit < context <= halo
        assert halo <= context_of(layers).halo_px


def test_the_whole_network_has_its_own_halo_and_pops_all() -> None:
    layers = unet_layers(UNetOptions(poolings=4, base=2))
    assert unjoined(layers, len(layers)) == frozenset()
    assert prefix_halo_px(layers, len(layers)) == context_of(layers).halo_px == 96
    assert prefix_halo_px(layers, 0) == 0
    deepest = next(i for i, layer in enumerate(layers) if isinstance(layer, Join))
    stashes = {i for i, layer in enumerate(layers) if isinstance(layer, Stash)}
    assert unjoined(layers, deepest) == stashes
    assert unjoined(layers, deepest + 1) == stashes - {max(stashes)}
