"""Windows of enlarged maps are cut out of what torch makes of the whole map, gradients too."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilenet.model.resample import AxisPlace, resampled

ROUNDING = 1e-14  # of values around 1
WAYS = [("nearest", False), ("bilinear", False), ("bilinear", True)]
SIZES = [
    ((1, 1), (7, 12)),  # an average of the image
    ((2, 3), (9, 17)),
    ((6, 1), (31, 1)),
    ((3, 6), (3, 12)),
    ((5, 4), (10, 8)),
    ((7, 5), (21, 20)),
    ((4, 9), (13, 10)),
    ((11, 8), (4, 5)),  # smaller
]
IDS = ["×".join(map(str, (*size, *out))) for size, out in SIZES]


def drawn(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def torchs(x: Tensor, size: tuple[int, int], mode: str, corners: bool) -> Tensor:
    more: dict[str, Any] = {} if mode == "nearest" else {"align_corners": corners}
    return F.interpolate(x, size, mode=mode, **more)


def looked_at(cells: int, out: int, mode: str, corners: bool, first: int, stop: int) -> range:
    """The cells of an axis on which torch's output cells `first` to `stop − 1` depend."""
    axis = torch.zeros(1, 1, 1, cells, dtype=torch.float64).requires_grad_()
    chosen = torch.zeros(1, 1, 1, out, dtype=torch.float64)
    chosen[..., first:stop] = drawn(stop - first).abs() + 0.1
    (gradient,) = torch.autograd.grad(torchs(axis, (1, out), mode, corners), axis, chosen)
    seen = (gradient.abs() > 1e-12).nonzero()[:, 3].tolist()
    return range(seen[0], seen[-1] + 1)


def spans(out: int, seed: int) -> list[tuple[int, int]]:
    """The whole axis, its first and last cell, and some parts of it."""
    rng = random.Random(seed)
    parts = [sorted(rng.sample(range(out + 1), 2)) for _ in range(4)]
    return [(0, out), (0, 1), (out - 1, out), *((a, b) for a, b in parts)]


def windows(
    size: tuple[int, int], out: tuple[int, int], mode: str, corners: bool
) -> Iterator[tuple[AxisPlace, AxisPlace, range, range]]:
    """Windows of the enlarged map, and the cells of the map that just reach for them."""
    choices = zip(spans(out[0], 1), reversed(spans(out[1], 2)), strict=True)
    for both in choices:
        places, needed = [], []
        for axis, (first, stop) in enumerate(both):
            seen = looked_at(size[axis], out[axis], mode, corners, first, stop)
            places.append(AxisPlace(seen.start, size[axis], first, stop - first, out[axis]))
            needed.append(seen)
        yield places[0], places[1], needed[0], needed[1]


def cut(x: Tensor, rows: range, cols: range) -> Tensor:
    return x[:, :, rows.start : rows.stop, cols.start : cols.stop]


@pytest.mark.parametrize(("mode", "corners"), WAYS)
@pytest.mark.parametrize(("size", "out"), SIZES, ids=IDS)
def test_the_whole_map_is_torchs(
    size: tuple[int, int], out: tuple[int, int], mode: str, corners: bool
) -> None:
    x, weights = drawn(2, 3, *size).requires_grad_(), drawn(2, 3, *out, seed=2)
    rows, cols = (AxisPlace(0, a, 0, b, b) for a, b in zip(size, out, strict=True))
    found, wanted = resampled(x, rows, cols, mode, corners=corners), torchs(x, out, mode, corners)
    assert found.shape == wanted.shape
    assert found.dtype == torch.float64
    assert float((found - wanted).detach().abs().max()) <= ROUNDING
    ours, theirs = (torch.autograd.grad(one, x, weights)[0] for one in (found, wanted))
    # A cell's gradient is a sum over all cells that it was enlarged to.
    assert float((ours - theirs).abs().max()) <= ROUNDING * float(weights.abs().sum((2, 3)).max())


@pytest.mark.parametrize(("mode", "corners"), WAYS)
@pytest.mark.parametrize(("size", "out"), SIZES, ids=IDS)
def test_windows_are_those_of_the_whole_map(
    size: tuple[int, int], out: tuple[int, int], mode: str, corners: bool
) -> None:
    """Of the cells that they look at alone: so none lies further away than torch's."""
    whole = drawn(2, 3, *size)
    for rows, cols, high, wide in windows(size, out, mode, corners):
        x = cut(whole, high, wide).clone().requires_grad_()
        found = resampled(x, rows, cols, mode, corners=corners)
        large = torchs(whole.requires_grad_(), out, mode, corners)
        there = (
            range(rows.out_first, rows.out_first + rows.out_count),
            range(cols.out_first, cols.out_first + cols.out_count),
        )
        wanted = cut(large, *there)
        assert found.shape == wanted.shape
        assert float((found - wanted).detach().abs().max()) <= ROUNDING
        weights = drawn(*wanted.shape, seed=3)
        (ours,) = torch.autograd.grad(found, x, weights)
        (theirs,) = torch.autograd.grad(wanted, whole, weights)
        bound = ROUNDING * float(weights.abs().sum((2, 3)).max())
        assert float((ours - cut(theirs, high, wide)).abs().max()) <= bound
        assert float(ours.abs().max()) > 1e-3


@pytest.mark.parametrize(("mode", "corners"), WAYS)
def test_a_window_may_reach_further_than_it_has_to(mode: str, corners: bool) -> None:
    whole = drawn(1, 2, 7, 9)
    wanted = torchs(whole, (21, 27), mode, corners)
    for first in range(3):
        for stop in (6, 7):
            rows, cols = AxisPlace(first, 7, 10, 4, 21), AxisPlace(first, 9, 11, 3, 27)
            found = resampled(whole[:, :, first:stop, first:], rows, cols, mode, corners=corners)
            assert float((found - wanted[:, :, 10:14, 11:14]).abs().max()) <= ROUNDING


@pytest.mark.parametrize(("mode", "corners"), WAYS)
def test_a_window_elsewhere_has_other_values(mode: str, corners: bool) -> None:
    """The places count: the same cells one cell further on are not enlarged alike."""
    x = drawn(1, 2, 5, 5)
    here, there = (
        resampled(x, AxisPlace(n, 40, 3 * n + 3, 6, 110), AxisPlace(n, 40, 3 * n + 3, 6, 110),
                  mode, corners=corners)
        for n in (0, 8)
    )  # fmt: skip
    assert not torch.equal(here, there)


def test_nearest_cells_are_those_that_torch_takes() -> None:
    """Cell o of m comes from cell ⌊o · n / m⌋ of n, but where floats of 32 bits round it down."""
    rounded = 0
    for cells in (1, 2, 3, 6, 12, 37):
        x = torch.arange(cells, dtype=torch.float64).view(1, 1, 1, cells)
        for out in (1, 5, 46, 82, 123, 111, 1000):
            place = AxisPlace(0, cells, 0, out, out)
            found = resampled(x, AxisPlace(0, 1, 0, 1, 1), place, "nearest", corners=False)
            assert torch.equal(found, F.interpolate(x, size=(1, out)))
            exact = [o * cells // out for o in range(out)]
            assert max(abs(a - b) for a, b in zip(found.flatten(), exact, strict=True)) <= 1
            rounded += found.flatten().tolist() != exact
    assert rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("mode", "corners"), WAYS)
def test_places_keep_their_digits_in_other_precisions(
    dtype: torch.dtype, mode: str, corners: bool
) -> None:
    """Far from the map's first cell: places are computed in float64, values in the map's own."""
    first, whole, out = 40_000, 50_000, 150_000
    x = drawn(1, 2, 4, 4).to(dtype)
    place = AxisPlace(first, whole, 3 * first + 4, 3, out)
    found = resampled(x, place, place, mode, corners=corners)
    exact = resampled(x.double(), place, place, mode, corners=corners)
    assert found.dtype == dtype
    assert float((found.double() - exact).abs().max()) <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("mode", "corners"), WAYS)
@pytest.mark.parametrize(
    ("large", "dtype"),
    [(torch.inf, torch.float64), (-torch.inf, torch.float64), (6e4, torch.float16)],
)
def test_large_cells_are_torchs_too(
    mode: str, corners: bool, large: float, dtype: torch.dtype
) -> None:
    """Infinite ones, as of the logarithm of 0, and those whose differences float16 cannot hold."""
    x = drawn(1, 2, 5, 7).to(dtype)
    x[0, 0, 1:3, 2:4], x[0, 1, 4, 6] = large, -large
    rows, cols = AxisPlace(0, 5, 0, 15, 15), AxisPlace(0, 7, 0, 21, 21)
    found = resampled(x, rows, cols, mode, corners=corners)
    wanted = torchs(x, (15, 21), mode, corners)
    rounding = ROUNDING if dtype == torch.float64 else 4e-3
    torch.testing.assert_close(found, wanted, rtol=rounding, atol=rounding, equal_nan=True)
