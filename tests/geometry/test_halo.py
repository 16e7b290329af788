"""The halo walk: the table of DESIGN.md, and what gradients reach in the real modules."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probe import looks_at, positive_network

from tilenet.errors import TilenetError
from tilenet.geometry.halo import context_of, epsilon_px, input_interval, norm_context
from tilenet.geometry.layers import (
    Activation,
    Conv,
    GlobalPool,
    Join,
    Layer,
    Norm,
    Pool,
    Stash,
    TransposedConv,
    Upsample,
)
from tilenet.geometry.maps import fewest_cells, output_size
from tilenet.geometry.unet import UNetOptions, unet_layers

PADDINGS, UPSAMPLINGS = ("same", "valid"), ("nearest", "bilinear", "transposed")
WAYS = list(product(PADDINGS, UPSAMPLINGS))


def unet(poolings: int, convolutions: int, kernel: int, **more: str) -> tuple[Layer, ...]:
    shape = UNetOptions(poolings, convolutions, base=2, bands=1, classes=1, kernel=kernel)
    return unet_layers(replace(shape, **more))


# --- the table, and the paper's formula


@pytest.mark.parametrize(
    ("poolings", "convolutions", "formula", "aligned", "any_pixel", "halo", "bilinear"),
    [
        (4, 2, 92, 94, 107, 96, 110),
        (5, 2, 188, 190, 219, 192, 222),
        (5, 5, 470, 475, 501, 480, 507),
        (6, 2, 380, 382, 443, 384, 446),
        (7, 2, 764, 766, 891, 768, 894),
    ],
)
def test_the_walk_gives_the_designs_table(
    poolings: int,
    convolutions: int,
    formula: int,
    aligned: int,
    any_pixel: int,
    halo: int,
    bilinear: int,
) -> None:
    context = context_of(unet(poolings, convolutions, 3))
    assert epsilon_px(poolings + 1, convolutions) == formula
    assert context.context_aligned_px == aligned
    assert context.context_any_pixel_px == any_pixel
    assert context.halo_px == halo
    assert context.alignment_px == 2**poolings
    smooth = context_of(unet(poolings, convolutions, 3, upsampling="bilinear"))
    assert smooth.context_aligned_px == bilinear


@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
@pytest.mark.parametrize("convolutions", [1, 2, 3])
@pytest.mark.parametrize("poolings", [1, 2, 4])
def test_epsilon_is_the_loss_per_side_of_any_unpadded_unet(
    poolings: int, convolutions: int, kernel: int
) -> None:
    layers = unet(poolings, convolutions, kernel, padding="valid")
    pixels = legal_sizes(poolings, convolutions, kernel)(40)
    lost = pixels - output_size(layers, pixels, exact=True)
    assert lost == 2 * epsilon_px(poolings + 1, convolutions, kernel)
    assert context_of(layers).offset_px == epsilon_px(poolings + 1, convolutions, kernel)


@pytest.mark.parametrize("levels", [1, 0, -3])
def test_epsilon_needs_two_levels(levels: int) -> None:
    with pytest.raises(TilenetError, match=rf"levels: {levels}\); nearest: 2"):
        epsilon_px(levels, 2)


# --- output sizes


def legal_sizes(poolings: int, convolutions: int, kernel: int) -> Callable[[int], int]:
    """From the bottleneck's input size to the input size of an unpadded network, built upwards."""

    def grow(bottom: int) -> int:
        for _ in range(poolings):
            bottom = 2 * bottom + convolutions * (kernel - 1)
        return bottom

    return grow


@given(
    st.sampled_from(PADDINGS),
    st.sampled_from(UPSAMPLINGS),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 60),
    st.integers(1, 60),
)
@settings(max_examples=150)
def test_output_size_is_the_real_networks(
    padding: str, upsampling: str, poolings: int, convolutions: int, rows: int, cols: int
) -> None:
    layers = unet(poolings, convolutions, 3, padding=padding, upsampling=upsampling)
    image = torch.randn(1, 1, rows, cols, dtype=torch.float64)
    sizes = output_size(layers, rows), output_size(layers, cols)
    if min(sizes) < 1:
        with pytest.raises(RuntimeError):
            positive_network(layers)(image)
    else:
        assert tuple(positive_network(layers)(image).shape[2:]) == sizes


@pytest.mark.parametrize(
    ("poolings", "convolutions", "kernel"), [(1, 1, 3), (2, 2, 3), (3, 1, 5), (4, 2, 3)]
)
def test_an_unpadded_network_takes_exactly_the_sizes_that_grow_from_its_bottleneck(
    poolings: int, convolutions: int, kernel: int
) -> None:
    layers = unet(poolings, convolutions, kernel, padding="valid")
    grow = legal_sizes(poolings, convolutions, kernel)
    lost = 2 * epsilon_px(poolings + 1, convolutions, kernel)
    wanted = {grow(b): grow(b) - lost for b in range(1, 400) if grow(b) > lost}
    found = {n: size for n in range(1, 400) if (size := output_size(layers, n, exact=True))}
    assert found == {n: size for n, size in wanted.items() if n < 400}
    assert len(found) > 5


@pytest.mark.parametrize("poolings", [1, 2, 3])
def test_a_padded_network_takes_multiples_of_its_stride_exactly(poolings: int) -> None:
    layers = unet(poolings, 2, 3)
    taken = [n for n in range(1, 60) if output_size(layers, n, exact=True)]
    assert taken == list(range(2**poolings, 60, 2**poolings))


def test_a_remainder_is_dropped_only_where_sizes_need_not_be_exact() -> None:
    layers = (Pool(1, 1, 3, 3), Conv(1, 1, padding=1), Upsample(1, 1, 3))
    assert [output_size(layers, n) for n in (5, 6, 7, 9)] == [3, 6, 6, 9]
    assert [output_size(layers, n, exact=True) for n in (5, 6, 7, 9)] == [0, 6, 0, 9]


# --- gradients: the independent measurement

SHAPES = [
    (1, 1, 3),
    (1, 2, 7),
    (2, 2, 1),
    (2, 1, 5),
    (3, 3, 3),
    (4, 2, 3),
    (5, 5, 3),
    (6, 2, 3),
    (7, 2, 3),
]
DEEP = [("same", "transposed"), ("valid", "bilinear")]


@pytest.mark.parametrize(
    ("poolings", "convolutions", "kernel", "padding", "upsampling"),
    [(*shape, *way) for shape in SHAPES for way in (WAYS if shape[0] < 7 else DEEP)],
)
def test_gradients_reach_exactly_as_far_as_the_walk_and_the_halo_say(
    poolings: int, convolutions: int, kernel: int, padding: str, upsampling: str
) -> None:
    layers = unet(poolings, convolutions, kernel, padding=padding, upsampling=upsampling)
    context, unit = context_of(layers), 2**poolings
    # an image wide enough by a rule that owes nothing to the walk
    bottom = 3 * convolutions * (kernel - 1) + 12
    pixels = unit * bottom
    if padding == "valid":
        pixels = legal_sizes(poolings, convolutions, kernel)(bottom)
    _, num_cells = looks_at(layers, pixels, [(0, 0)])
    offset = (pixels - num_cells) // 2
    inset = context.halo_px - offset if padding == "valid" else 0
    start = num_cells // 2 // unit * unit + inset
    phases = [(cell, cell) for cell in range(start, start + unit)]
    window = (start, start + unit - 1)
    found, _ = looks_at(layers, pixels, [*phases, window])

    def context_px(cells: tuple[int, int], interval: tuple[int, int] | None) -> int:
        assert interval is not None
        assert interval[0] > 0
        assert interval[1] < pixels - 1
        return max(cells[0] + offset - interval[0], interval[1] - cells[1] - offset)

    assert context.offset_px == offset
    measured = [context_px(*pair) for pair in zip(phases, found[:-1], strict=True)]
    assert context.context_any_pixel_px == max(measured)
    assert context.context_aligned_px == context_px(window, found[-1])
    assert [input_interval(layers, *cells) for cells in [*phases, window]] == found
    # The halo is the least that holds the aligned context.
    if padding == "same" or kernel == 1:
        assert context.halo_px % unit == 0
        assert 0 <= context.halo_px - context.context_aligned_px < unit
    elif upsampling == "bilinear":  # the map's halo, where enlarging clamps, is left out
        inset = context.halo_px - context.offset_px
        assert input_interval(layers, inset, inset)[0] >= 0
        assert input_interval(layers, inset - 1, inset - 1)[0] < 0
    else:
        assert (
            context.halo_px == context.offset_px == epsilon_px(poolings + 1, convolutions, kernel)
        )


@pytest.mark.parametrize(("padding", "upsampling"), WAYS)
def test_gradients_reach_as_far_along_rows_as_along_columns(padding: str, upsampling: str) -> None:
    """On the modules as they are, in two dimensions."""
    layers = unet(2, 1, 3, padding=padding, upsampling=upsampling)
    context, pixels = context_of(layers), legal_sizes(2, 1, 3)(16) if padding == "valid" else 64
    network, reach = positive_network(layers), []
    ramp = torch.linspace(1, 2, pixels, dtype=torch.float64)
    rising = ramp[:, None] + ramp[None, :] * 1.1
    for image in (rising, rising.flip(0, 1)):
        for phase in range(4):
            leaf = image[None, None].clone().requires_grad_()
            out = network(leaf)
            cell = out.shape[2] // 8 * 4 + phase
            (gradient,) = torch.autograd.grad(out[0, 0, cell, cell], leaf)
            rows, cols = gradient[0, 0].nonzero(as_tuple=True)
            place = cell + (pixels - out.shape[2]) // 2
            reach += [[(place - x.min()).item(), (x.max() - place).item()] for x in (rows, cols)]
    rows_reach, cols_reach = torch.tensor(reach[::2]), torch.tensor(reach[1::2])
    assert torch.equal(rows_reach, cols_reach)
    assert rows_reach.max() == context.context_any_pixel_px


OTHER_STACKS = {
    "dilated": (Conv(1, 2, 3, padding=1), Conv(2, 2, 3, dilation=5, padding=5)),
    "overlapping max-pooling": (
        Stash(1, 1, "a"),
        Pool(1, 1, 3, 2, 1),
        Conv(1, 1, 3, padding=1),
        TransposedConv(1, 1, 3, 2, 1, 1),
        Join(1, 2, ("a",)),
        Conv(2, 1, 3, padding=1),
    ),
    "strided convolutions, transposed k4": (
        Stash(1, 1, "a"),
        Conv(1, 2, 4, 2, padding=1),
        Stash(2, 2, "b"),
        Conv(2, 2, 4, 2, padding=1),
        TransposedConv(2, 2, 4, 2, 1),
        Join(2, 4, ("b",)),
        TransposedConv(4, 1, 4, 2, 1),
        Join(1, 2, ("a",)),
    ),
    "average pooling by 3, bilinear by 3": (
        Conv(1, 2, 3, padding=1),
        Pool(2, 2, 3, 3, mode="average"),
        Conv(2, 2, 3, padding=1),
        Upsample(2, 2, 3, "bilinear"),
    ),
    "average pooling by 4, bicubic by 2 twice": (
        Pool(1, 1, 4, 4, mode="average"),
        Upsample(1, 1, 2, "bicubic"),
        Upsample(1, 1, 2, "bicubic"),
    ),
    "a skip that looks where the way below does not": (
        Stash(1, 1, "a"),
        Conv(1, 1, 1, 3),
        TransposedConv(1, 1, 3, 3, 1, 2),
        Join(1, 2, ("a",)),
    ),
}


@pytest.mark.parametrize("name", OTHER_STACKS)
def test_the_walk_knows_nothing_of_unets(name: str) -> None:
    layers = OTHER_STACKS[name]
    context = context_of(layers)
    unit = context.alignment_px
    middle = 60 // unit * unit
    phases = [(cell, cell) for cell in range(middle, middle + unit)]
    window = (middle, middle + unit - 1)
    found, _ = looks_at(layers, 120, [*phases, window], 1e-12)
    assert [input_interval(layers, *cells) for cells in [*phases, window]] == found
    reach = [max(c[0] - f[0], f[1] - c[1]) for c, f in zip(phases, found, strict=False) if f]
    assert context.context_any_pixel_px == max(reach)
    assert found[-1]
    assert context.context_aligned_px == max(middle - found[-1][0], found[-1][1] - window[1])


def test_the_alignment_is_a_multiple_of_every_stride() -> None:
    layers: list[Layer] = []
    for factor in (2, 3):
        layers += [Pool(1, 1, factor, factor), Conv(1, 1, padding=1), Upsample(1, 1, factor)]
    assert context_of(tuple(layers)).alignment_px == 6


# --- what tiles cannot give


@pytest.mark.parametrize(
    ("layers", "what"),
    [
        ((Pool(1, 1), Conv(1, 1, padding=1)), r"one cell per input pixel \(stride: 2"),
        ((Conv(1, 1, 4, padding=1),), r"stride: 1, first cell at pixel 1/2"),
        ((Upsample(1, 1),), r"stride: 1/2"),
        ((Stash(1, 1, "s"), Pool(1, 1), Join(1, 2, ("s",)), Upsample(2, 2)), r"s: strides 1 and 2"),
        (
            (Stash(1, 1, "s"), Conv(1, 1, 4, padding=1), Join(1, 2, ("s",)), Conv(2, 1, 2)),
            r"s: strides 1 and 1, shift -?1/2 cells",
        ),
        (
            (
                *(Stash(1, 1, "s"), Pool(1, 1), TransposedConv(1, 1, 3, 2, 1, 1)),
                *(Join(1, 2, ("s",)), Conv(2, 1, 2)),
            ),
            r"stride: 1, first cell at pixel 1/2",
        ),
    ],
)
def test_a_network_off_its_inputs_grid_is_refused(layers: tuple[Layer, ...], what: str) -> None:
    with pytest.raises(TilenetError, match=what):
        context_of(layers)


def test_norms_say_over_what_they_take_statistics() -> None:
    tile, image = Norm(4, 4, scope="tile"), Norm(4, 4, "batch", "image")
    assert norm_context((Conv(4, 4),)) == "none"
    assert norm_context((Conv(4, 4), tile)) == "tile"
    assert norm_context((tile, Conv(4, 4), image)) == "image"


def test_fewest_cells_are_those_of_the_deepest_normalised_map() -> None:
    options = UNetOptions(poolings=3, base=2, norm="batch")
    assert fewest_cells(unet_layers(options), 8, 16) == 2
    assert fewest_cells(unet_layers(options), 40, 24) == 5 * 3
    assert fewest_cells(unet_layers(replace(options, padding="valid")), 92, 108) == 4 * 6
    assert fewest_cells(unet_layers(replace(options, norm="none")), 8, 8) == 0


def test_a_group_of_channels_behind_an_average_has_as_many_values_as_channels() -> None:
    pool = GlobalPool(8, 8)
    for groups, values in ((1, 8), (4, 2), (8, 1)):
        assert fewest_cells((pool, Norm(8, 8, "group", groups=groups)), 40, 24) == values
    assert fewest_cells((pool, Norm(8, 8, "instance")), 40, 24) == 1


def test_a_tile_sees_what_its_averages_and_norms_see() -> None:
    """The output itself looks at its own pixel alone."""
    far = Conv(4, 4, 9, padding=4)
    gate = Join(4, 4, ("x",), "multiply")
    summed = (Stash(4, 4, "x"), far, Activation(4, 4), GlobalPool(4, 4), gate)
    assert context_of(summed).halo_px == context_of(summed).context_aligned_px == 4
    assert context_of(summed).context_any_pixel_px == 0
    norm = (Conv(4, 4, 7, padding=3), Norm(4, 4), *summed)
    assert context_of(norm).halo_px == 3 + 4
    frozen = (norm[0], Norm(4, 4, "batch", "frozen"), Conv(4, 4, 3, padding=1))
    assert context_of(frozen).halo_px == 3 + 1
