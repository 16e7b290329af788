"""Brightness, contrast and noise are functions of step, image and pixel, and of no tile."""

from statistics import NormalDist

import numpy as np
import pytest
import torch

from tilenet.geometry.windows import Window, reflected
from tilenet.model.inputs import Radiometry

BANDS, SIZE = 3, (19, 26)
ALL = Radiometry(0.3, 0.5, 0.7)
WHOLE = Window(0, 0, *SIZE)


def image(seed: int = 1, size: tuple[int, int] = SIZE) -> tuple[torch.Tensor, np.ndarray]:
    rng = np.random.default_rng(seed)
    valid = rng.random(size) < 0.8
    pixels = np.where(valid, rng.normal(size=(1, BANDS, *size)), 0.0)
    return torch.from_numpy(pixels), valid


def altered(how: Radiometry, *key: int) -> torch.Tensor:
    pixels, valid = image()
    how.alter(pixels, valid, WHOLE, SIZE, *key)
    return pixels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_window_is_altered_as_the_whole(dtype: torch.dtype) -> None:
    """To the bit, also where it reaches over the edges, near and far."""
    pixels, valid = image()
    whole = pixels.to(dtype, copy=True)
    ALL.alter(whole, valid, WHOLE, SIZE, 5, 2, 9)
    for window in [Window(3, 5, 7, 8), Window(-4, 20, 9, 11), Window(-40, -50, 90, 120)]:
        rows = reflected(window.row, window.height, SIZE[0])
        cols = reflected(window.col, window.width, SIZE[1])
        part = pixels.to(dtype)[:, :, rows][..., cols]
        ALL.alter(part, valid[rows][:, cols], window, SIZE, 5, 2, 9)
        assert torch.equal(part, whole[:, :, rows][..., cols])


def test_pixels_without_data_stay_zero() -> None:
    _, valid = image()
    found = altered(ALL, 5, 2, 9)[0].numpy()
    assert (found[:, ~valid] == 0).all()
    assert (found[:, valid] != image()[0][0].numpy()[:, valid]).all()


def test_nothing_asked_changes_nothing() -> None:
    assert torch.equal(altered(Radiometry(), 5, 2, 9), image()[0])


@pytest.mark.parametrize("how", [Radiometry(0.3), Radiometry(0, 0.5), Radiometry(0, 0, 0.7)])
def test_each_part_of_the_key_counts(how: Radiometry) -> None:
    keys = [(5, 2, 9), (6, 2, 9), (5, 3, 9), (5, 2, 8)]
    found = [altered(how, *key) for key in keys]
    assert torch.equal(found[0], altered(how, 5, 2, 9))
    for one in found[1:]:
        assert not torch.allclose(one, found[0], rtol=1e-3)


def test_gains_and_offsets_are_uniform_and_one_per_band() -> None:
    gains, offsets = [], []
    steps, light = 400, Radiometry(0.3, 0.5)
    for step in range(steps):
        pair = torch.tensor([0.0, 1.0], dtype=torch.float64).repeat(1, BANDS, 1, 1)
        light.alter(pair, np.ones((1, 2), bool), Window(0, 0, 1, 2), (1, 2), 5, step, 0)
        offset, sum_ = pair[0, :, 0].T.numpy()
        offsets.append(offset)
        gains.append(sum_ - offset)
    for drawn, middle, reach in [(gains, 1.0, 0.5), (offsets, 0.0, 0.3)]:
        numbers = (np.array(drawn) - middle) / reach
        assert np.abs(numbers).max() <= 1
        # Of a uniform number in ±1 the variance is 1/3, of its square 4/45.
        assert np.abs(numbers.mean(axis=0)).max() < 5 / (3 * steps) ** 0.5
        assert np.abs((numbers**2).mean(axis=0) - 1 / 3).max() < 5 * (4 / 45 / steps) ** 0.5
    every = np.hstack([np.array(gains), np.array(offsets)])
    apart = np.corrcoef(every.T) - np.eye(2 * BANDS)
    assert np.abs(apart).max() < 5 / steps**0.5


def test_noise_is_normal_and_independent_of_its_neighbours() -> None:
    size = 150, 200
    noise = torch.zeros(1, BANDS, *size, dtype=torch.float64)
    whole = Window(0, 0, *size)
    Radiometry(noise=0.7).alter(noise, np.ones(size, bool), whole, size, 5, 2, 9)
    numbers = noise[0].numpy() / 0.7
    count = numbers.size
    quantiles = np.array([NormalDist().inv_cdf(k / 64) for k in range(1, 64)])
    counts = np.bincount(np.searchsorted(quantiles, numbers.ravel()), minlength=64)
    chi2 = ((counts - count / 64) ** 2 / (count / 64)).sum()
    assert abs(chi2 - 63) < 5 * 126**0.5
    neighbours = [
        (numbers[1:], numbers[:-1]),
        (numbers[:, 1:], numbers[:, :-1]),
        (numbers[..., 1:], numbers[..., :-1]),
    ]
    for ours, theirs in neighbours:
        assert abs((ours * theirs).mean()) < 5 / ours.size**0.5
