"""`Layer.needs` cell by cell, edges included: what gradients of the real torch modules reach.

tests/geometry/test_layers.py looks at the middle of a row; here are whole maps of uneven sides,
each output cell of them, rows and columns apart.
"""

from itertools import product
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probe import positive_network
from torch import Tensor

from tilenet.errors import TilenetError
from tilenet.geometry.grid import Grid
from tilenet.geometry.halo import input_interval
from tilenet.geometry.layers import (
    Conv,
    Expand,
    GlobalPool,
    Join,
    Layer,
    Pool,
    Stash,
    TransposedConv,
    Upsample,
    walk,
)
from tilenet.geometry.maps import map_grids, map_shapes, output_size

ROWS, COLS = 13, 17
LEAST = 1e-12  # gradients up to this are rounding
Ends = tuple[int, int]


def ramps(channels: int, rows: int, cols: int) -> list[Tensor]:
    """Maps that rise along both axes, or fall: a maximum lies at one end of its window."""
    down = torch.linspace(1, 2, rows, dtype=torch.float64)[:, None]
    right = torch.linspace(1, 2, cols, dtype=torch.float64) ** 2
    rising = (down * right).repeat(1, channels, 1, 1)
    return [rising, rising.flip(2, 3)]


def reached(layers: tuple[Layer, ...], size: Ends) -> dict[Ends, tuple[list[int], list[int]]]:
    """For each output cell the rows and the columns of the input on which it depends."""
    network = positive_network(layers)
    found: dict[Ends, tuple[set[int], set[int]]] = {}
    for image in ramps(layers[0].in_channels, *size):
        image.requires_grad_()
        out = network(image).sum(1)[0]
        for cell in product(range(out.shape[0]), range(out.shape[1])):
            (gradient,) = torch.autograd.grad(out[cell], image, retain_graph=True)
            seen = (gradient[0].abs() > LEAST).any(0)
            rows, cols = found.setdefault(cell, (set(), set()))
            rows |= set(seen.any(1).nonzero()[:, 0].tolist())
            cols |= set(seen.any(0).nonzero()[:, 0].tolist())
    return {cell: (sorted(rows), sorted(cols)) for cell, (rows, cols) in found.items()}


def assert_ends(found: list[int], first: int, last: int, cells: int, *, gaps: bool) -> None:
    """What was reached ends where it was said to, unless that lies outside of the map."""
    assert all(first <= cell <= last for cell in found)
    inside = max(first, 0), min(last, cells - 1)
    for said, end in ((first, found[:1]), (last, found[-1:])):
        if 0 <= said < cells:
            assert end == [said]
        elif not gaps and inside[0] <= inside[1]:
            assert end == [inside[0] if said < 0 else inside[1]]


WINDOWED: list[Layer] = [
    Conv(1, 1, 3, 2, 1, 1),
    Conv(1, 1, 3, 2, 1, 0, extra=1),  # as TensorFlow pads
    Conv(1, 1, 3, 1, 2, 2),
    Conv(1, 1, 3, 2, 2, 2, extra=1),
    Conv(1, 1, 5, 3, 2, 3),
    Conv(1, 1, 2, 1, 3, 1, extra=2),
    Conv(1, 1, 4, 2, 1, 1),
    Conv(1, 1, 1, 3, extra=2),
    Conv(4, 4, 3, 2, 1, 1, groups=4),
    Pool(1, 1, 3, 2, 1),
    Pool(1, 1, 3, 2, 0, extra=1),  # `ceil_mode`
    Pool(1, 1, 2, 2, extra=1),
    Pool(1, 1, 4, 3, 2, extra=2),
    Pool(1, 1, 3, 2, 1, "average", extra=1),
    Pool(1, 1, 2, 3, 0, "average"),
    Pool(1, 1, 3, 1, 0, "average", extra=2),
]


@pytest.mark.parametrize("layer", WINDOWED, ids=repr)
def test_each_cell_of_a_map_looks_at_what_it_needs(layer: Layer) -> None:
    found = reached((layer,), (ROWS, COLS))
    assert len(found) == layer.size(ROWS) * layer.size(COLS) > 0
    gaps = getattr(layer, "dilation", 1) > 1
    for (row, col), (rows, cols) in found.items():
        high, wide = layer.needs(row, row), layer.needs(col, col)
        if high[0] >= ROWS or wide[0] >= COLS:  # behind the map: only what is padded
            assert rows == cols == []
            continue
        assert_ends(rows, *high, ROWS, gaps=gaps)
        assert_ends(cols, *wide, COLS, gaps=gaps)
    assert found[layer.size(ROWS) // 2, layer.size(COLS) // 2][0]


@st.composite
def windowed(draw: st.DrawFn) -> Layer:
    kernel, stride = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    extra = draw(st.integers(0, 2))
    if draw(st.booleans()):
        dilation, padding = draw(st.integers(1, 3)), draw(st.integers(0, 3))
        return Conv(1, 1, kernel, stride, dilation, padding, extra=extra)
    modes: tuple[Literal["max", "average"], ...] = ("max", "average")
    mode, padding = draw(st.sampled_from(modes)), draw(st.integers(0, kernel // 2))
    return Pool(1, 1, kernel, stride, padding, mode, min(extra, kernel - 1))


@given(windowed(), windowed(), st.integers(0, 5), st.integers(0, 3))
@settings(max_examples=60)
def test_two_layers_look_at_what_the_walk_says(
    one: Layer, other: Layer, shift: int, more: int
) -> None:
    """Intervals of cells in the middle, along both axes."""
    layers, size = (one, other), (150, 141)
    network = positive_network(layers)
    cells = [output_size(layers, pixels) // 2 - 3 + shift for pixels in size]
    seen = torch.zeros(size, dtype=torch.bool)
    for image in ramps(1, *size):
        out = network(image.requires_grad_())[0, 0]
        part = out[cells[0] : cells[0] + more + 1, cells[1] : cells[1] + 1]
        (gradient,) = torch.autograd.grad(part.sum(), image)
        seen |= gradient[0, 0].abs() > LEAST
    for axis, last in ((0, cells[0] + more), (1, cells[1])):
        places = seen.any(1 - axis).nonzero()[:, 0].tolist()
        first, end = input_interval(layers, cells[axis], last)
        assert first >= 0
        assert end < size[axis]
        assert (places[0], places[-1]) == (first, end)


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_enlargement_by_corners_looks_no_further_than_it_needs(factor: int) -> None:
    """In maps of any size; and somewhere in one of them it looks as far as that on both sides."""
    layer = Upsample(1, 1, factor, "bilinear", corners=True)
    spare: set[tuple[int, int]] = set()
    for cells in range(1, 14):
        place = torch.nn.functional.interpolate(
            torch.eye(cells, dtype=torch.float64)[:, None],
            cells * factor,
            mode="linear",
            align_corners=True,
        )[:, 0].T
        real = reached((layer,), (cells, 2))
        for cell in range(cells * factor):
            seen = (place[cell] > LEAST).nonzero()[:, 0].tolist()
            assert real[cell, 0][0] == seen
            first, last = layer.needs(cell, cell)
            assert first <= seen[0]
            assert seen[-1] <= last
            spare.add((seen[0] - first, last - seen[-1]))
    assert min(before for before, _ in spare) == min(behind for _, behind in spare) == 0
    assert max(max(both) for both in spare) <= 2


@pytest.mark.parametrize("factor", [1, 2, 3, 4, 5])
def test_what_bicubic_enlargement_needs_rises_with_cells(factor: int) -> None:
    """Where a place falls exactly on a cell that is more than it looks at, else just that."""
    layer, cells = Upsample(1, 1, factor, "bicubic"), 7
    spare = set[bool]()
    for (cell, _), (seen, _) in reached((layer,), (cells, 2)).items():
        first, last = layer.needs(cell, cell)
        on_a_cell = (2 * cell + 1 - factor) % (2 * factor) == 0
        spare.add(on_a_cell)
        inside = max(first, 0), min(last, cells - 1)
        assert seen == ([(first + last) // 2] if on_a_cell else list(range(*inside))) + (
            [] if on_a_cell else [inside[1]]
        )
        assert layer.needs(cell + 1, cell + 1) >= (first, last)
    assert spare == ({True} if factor == 1 else {True, False} if factor % 2 else {False})


@pytest.mark.parametrize("stride", [1, 2, 3, 5])
def test_smaller_maps_by_corners_look_into_their_blocks(stride: int) -> None:
    """In maps of any size; and in the first and the last cell to its outer end."""
    layer = Pool(1, 1, stride, stride, mode="corners")
    for cells in range(1, 9):
        found = reached((layer,), (cells * stride, 2 * stride))
        for cell in range(cells):
            first, last = layer.needs(cell, cell)
            assert (first, last) == (cell * stride, cell * stride + stride - 1)
            assert {*found[cell, 0][0]} <= {*range(first, last + 1)}
        assert found[0, 0][0][0] == 0
        if cells > 1:
            assert found[cells - 1, 0][0][-1] == cells * stride - 1


# --- layers of whole maps, and joins

SIZES = [(24, 36), (36, 24)]
BRANCHED: dict[str, tuple[Layer, ...]] = {
    "gate": (
        Conv(3, 4, 3, 2, extra=1),
        Stash(4, 4, "x"),
        GlobalPool(4, 4),
        Conv(4, 4, 1),
        Join(4, 4, ("x",), "multiply"),
        Upsample(4, 4, corners=False),
    ),
    "pyramid": (
        Pool(3, 3, 3, 2, extra=1),
        Stash(3, 3, "x"),
        Stash(3, 3, "size", sizes=True),
        GlobalPool(3, 3, 6),
        Conv(3, 2, 3, padding=1),
        Expand(2, 2, "size", corners=True),
        Join(2, 5, ("x",), place=1),
        TransposedConv(5, 4, 4, 2, 1),
    ),
    "back": (
        Conv(3, 6, 1),
        Stash(6, 6, "x"),
        Stash(6, 6, "y"),
        GlobalPool(6, 6, 2),
        Stash(6, 6, "g"),
        GlobalPool(6, 6, 1),
        Join(6, 6, ("g",), "add"),
        GlobalPool(6, 6, 1),
        Join(6, 6, ("x",), "multiply"),
        Pool(6, 6, 3, 1, 1),
        Join(6, 12, ("y",), "concatenate"),
    ),
    "two ways": (
        Stash(3, 3, "x"),
        Conv(3, 4, 5, padding=2),
        Stash(4, 4, "y"),
        Join(4, 3, ("x",), "take"),
        Conv(3, 4, 7, padding=3),
        Join(4, 4, ("y",), "add"),
        Stash(4, 4, "z"),
        GlobalPool(4, 4),
        Join(4, 4, ("z",), "multiply"),
    ),
    "taken": (
        Stash(3, 3, "x"),
        Conv(3, 2, 3, 4),
        GlobalPool(2, 2, 3),
        Stash(2, 2, "g"),
        Join(2, 3, ("x",), "take"),
        Conv(3, 4, 5, padding=2),
        Stash(4, 4, "size", sizes=True),
        Stash(4, 4, "y"),
        Join(4, 2, ("g",), "take"),
        Expand(2, 2, "size", "nearest"),
        Join(2, 6, ("y",)),
    ),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", BRANCHED)
def test_sizes_of_all_maps_are_the_modules(name: str, size: Ends) -> None:
    layers = BRANCHED[name]
    network = positive_network(layers)
    shapes = [(layers[0].in_channels, *size)]
    for module in network:
        module.register_forward_hook(lambda _, x, y: shapes.append(tuple(y.shape[1:])))
    network(torch.rand(1, layers[0].in_channels, *size, dtype=torch.float64))
    found = [(one.channels, one.rows, one.cols) for one in map_shapes(layers, *size)]
    assert found == shapes


@pytest.mark.parametrize("name", BRANCHED)
def test_whole_maps_are_those_behind_an_average_until_they_meet_cells(name: str) -> None:
    """What is told from the grids is what does not change its size with the image's."""
    layers = BRANCHED[name]
    sizes = [
        [(one.rows, one.cols) for one in map_shapes(layers, *size)] for size in ((24, 36), (48, 72))
    ]
    fixed = [one == other for one, other in zip(*sizes, strict=True)]
    assert any(fixed)
    assert [grid.whole for grid in map_grids(layers)] == fixed


@pytest.mark.parametrize("name", BRANCHED)
def test_cells_lie_alike_however_a_network_branches(name: str) -> None:
    """Stretched by the product of what strides made of it, wherever whole maps were in between."""
    layers = BRANCHED[name]

    def through(layer: Layer, grid: Grid, kept: tuple[Grid, ...]) -> Grid:
        return layer.grid(grid, *kept)

    grids = walk(layers, Grid(), through)
    for grid, shape in zip(grids, map_shapes(layers, 72, 144), strict=True):
        if not grid.whole:
            assert grid.stride * shape.rows <= 72 < grid.stride * (shape.rows + 2)
    assert grids[-1] == Grid()


@pytest.mark.parametrize("name", BRANCHED)
def test_the_walk_goes_around_averages(name: str) -> None:
    """It says what a cell looks at where the averages of the image stay as they are."""
    layers, size = BRANCHED[name], (48, 60)
    network = positive_network(layers)
    for layer, module in zip(layers, network, strict=True):
        if isinstance(layer, GlobalPool):
            module.register_forward_hook(lambda _, x, y: y.detach())
    for row, col in ((20, 31), (21, 30), (22, 29), (23, 28)):
        seen = torch.zeros(size, dtype=torch.bool)
        for image in ramps(layers[0].in_channels, *size):
            out = network(image.requires_grad_()).sum(1)[0]
            (gradient,) = torch.autograd.grad(out[row, col], image)
            seen |= (gradient[0].abs() > LEAST).any(0)
        for axis, cell in ((0, row), (1, col)):
            places = seen.any(1 - axis).nonzero()[:, 0].tolist()
            assert (places[0], places[-1]) == input_interval(layers, cell, cell)


def test_a_network_that_looks_at_averages_only_is_refused() -> None:
    with pytest.raises(TilenetError, match="must look at the pixels around each pixel"):
        input_interval((Conv(1, 1, padding=1), GlobalPool(1, 1, 4)), 1, 2)
    layers = (Stash(1, 1, "size", sizes=True), GlobalPool(1, 1, 2), Expand(1, 1, "size"))
    with pytest.raises(TilenetError, match="must look at the pixels around each pixel"):
        input_interval(layers, 1, 2)
