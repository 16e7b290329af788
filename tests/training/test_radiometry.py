"""Brightness, contrast and noise are functions of step, image and pixel, and of no tile."""

import numpy as np
import pytest
import torch

from tilenet.geometry.windows import Window, reflected
from tilenet.training.images.radiometry import Radiometry

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


def test_nothing_asked_changes_nothing() -> None:
    assert torch.equal(altered(Radiometry(), 5, 2, 9), image()[0])
