"""Moments of tiles merged into those of the image, and norms that use them."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tilenet.geometry.layers import Norm
from tilenet.geometry.windows import Window
from tilenet.parallel.exchange import fixed as fixed_norm
from tilenet.parallel.exchange.fixed import FixedNorm, Moments, moments_of

CHANNELS, GROUPS = 6, 3


def image(offset: float, spread: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, CHANNELS, 61, 83, generator=generator, dtype=torch.float64)
    apart = torch.arange(CHANNELS)[None, :, None, None]
    ramp = torch.linspace(-1, 1, 83)
    return (offset + spread * (x + apart + ramp)).to(dtype)


def merged(x: torch.Tensor, rows: list[int], cols: list[int]) -> Moments:
    found: Moments | None = None
    for top, bottom in pairwise(rows):
        for left, right in pairwise(cols):
            # a tile that has read two cells more on each side that has them
            low, first = max(top - 2, 0), max(left - 2, 0)
            tile = x[:, :, low : bottom + 2, first : right + 2]
            own = Window(top - low, left - first, bottom - top, right - left)
            one = moments_of(tile, own)
            found = one if found is None else found.merged(one)
    assert found is not None
    return found


@pytest.mark.parametrize(("offset", "spread"), [(0, 1), (40_000, 50), (1e6, 1e-1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk", [100, 1 << 21])
def test_merged_moments_are_the_images(
    monkeypatch: pytest.MonkeyPatch, offset: float, spread: float, dtype: Any, chunk: int
) -> None:
    monkeypatch.setattr(fixed_norm, "CHUNK_CELLS", chunk)
    x = image(offset, spread, dtype)
    found = merged(x, [0, 1, 20, 33, 61], [0, 40, 41, 83])
    cells = x[0].reshape(CHANNELS, -1).numpy().astype(np.longdouble)
    mean = cells.mean(1)
    variance = ((cells - mean[:, None]) ** 2).mean(1)
    assert found.count == cells.shape[1]
    deviation = np.sqrt(variance)
    most = 1e-13 + 4e-16 * np.abs(mean) / deviation  # a mean in float64 has no more digits
    assert (np.abs(found.mean - mean) / deviation < most).all()
    assert (np.abs(found.squares / found.count - variance) / variance < most).all()


@pytest.mark.parametrize("norm", ["instance", "group"])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(
    ("offset", "spread", "dtype", "most"),
    [
        (0, 1, torch.float64, 1e-13),
        (40_000, 50, torch.float64, 1e-11),
        (40_000, 50, torch.float32, 1e-6),
    ],
)
def test_norm_is_the_plain_one(
    norm: Any, affine: bool, offset: float, spread: float, dtype: Any, most: float
) -> None:
    layer = Norm(CHANNELS, CHANNELS, norm, "image", GROUPS if norm == "group" else 1, affine)
    plain: Any
    if norm == "instance":
        plain = nn.InstanceNorm2d(CHANNELS, affine=affine)
    else:
        plain = nn.GroupNorm(GROUPS, CHANNELS, affine=affine)
    for number, parameter in enumerate(plain.parameters()):
        parameter.data = torch.linspace(-1 - number, 2, CHANNELS)
    x = image(offset, spread, dtype)
    fixed = FixedNorm(plain.to(dtype), layer, merged(x, [0, 7, 61], [0, 40, 83]))
    assert set(fixed.state_dict()) == set(plain.state_dict())
    with torch.no_grad():
        wanted = plain.double()(x.double())
        found = fixed.to(dtype)(x)
    assert found.dtype == dtype
    assert float((found - wanted).abs().max() / wanted.abs().max()) < most


def test_own_cells_must_lie_on_the_map() -> None:
    with pytest.raises(AssertionError, match="must lie on the map"):
        moments_of(torch.zeros(1, 2, 4, 4), Window(2, 0, 3, 4))
