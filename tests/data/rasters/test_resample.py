"""Blocks of pixels: means and modes against loops in Python."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilenet.data.rasters.resample import block_mean, block_mode

SIZES = st.tuples(st.integers(1, 13), st.integers(1, 13))
DTYPES = ["uint8", "int16", "uint16", "int32", "float32", "float64"]


@given(SIZES, st.integers(1, 5), st.sampled_from(DTYPES), st.integers(0, 2**32))
@settings(max_examples=150)
def test_a_coarse_pixel_is_the_mean_of_its_valid_fine_ones(
    size: tuple[int, int], factor: int, dtype: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.random((2, *size)) * 200 - 60 * (dtype[0] != "u")).astype(dtype)
    valid = rng.random(size) < 0.6
    if dtype[0] == "f":
        values[:, ~valid] = np.nan  # what is not valid must not leak
    means, some = block_mean(values, valid, factor)
    height, width = (-(-side // factor) for side in size)
    assert means.shape == (2, height, width)
    wide = dtype in ("int32", "float64")  # float32 does not hold all of their values
    assert means.dtype == (np.float64 if wide else np.float32)
    for row in range(height):
        for col in range(width):
            block = np.s_[row * factor : (row + 1) * factor, col * factor : (col + 1) * factor]
            inside = values[:, block[0], block[1]][:, valid[block]].astype(np.float64)
            assert some[row, col] == (inside.shape[1] > 0)
            expected = inside.mean(axis=1) if inside.shape[1] else np.zeros(2)
            # float32: one rounding of the quotient; float64: of each sum too
            tolerance = 1e-14 if wide else 6e-8
            assert means[:, row, col] == pytest.approx(expected, rel=tolerance, abs=1e-12)


def test_large_whole_numbers_are_summed_without_rounding() -> None:
    values = np.array([[[2**24 + 1, 2**24 + 3], [2**24 + 5, 2**24 + 7]]], np.int32)
    means, _ = block_mean(values, np.ones((2, 2), bool), 2)
    assert means.item() == 2**24 + 4
    means, _ = block_mean(values[:, :, :1], np.ones((2, 1), bool), 2)
    assert means.item() == 2**24 + 3


@pytest.mark.parametrize("factor", [2, 3, 5])
def test_the_largest_numbers_have_a_mean_too(factor: int) -> None:
    random = np.random.default_rng(factor)
    values, valid = random.uniform(0.5, 1, (2, 11, 13)), random.random((11, 13)) < 0.8
    plain, _ = block_mean(values, valid, factor)
    with np.errstate(all="raise"):
        large, _ = block_mean(values * 2.0**1023, valid, factor)
    assert np.array_equal(large, plain * 2.0**1023)


@given(SIZES, st.integers(1, 5), st.integers(0, 2**32))
@settings(max_examples=150)
def test_a_coarse_label_is_the_most_frequent_and_smallest_that_counts(
    size: tuple[int, int], factor: int, seed: int
) -> None:
    labels = np.random.default_rng(seed).choice([-4, 0, 1, 2, 7, 300], size).astype(np.int64)
    modes = block_mode(labels, factor, ignore=1)
    height, width = (-(-side // factor) for side in size)
    expected = np.empty((height, width), np.int64)
    for row in range(height):
        for col in range(width):
            block = labels[row * factor : (row + 1) * factor, col * factor : (col + 1) * factor]
            counts = Counter(block[block != 1].tolist())
            best = max(counts.values(), default=0)
            expected[row, col] = min((v for v, n in counts.items() if n == best), default=1)
    assert np.array_equal(modes, expected)
