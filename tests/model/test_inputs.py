"""From pixels to what the network sees."""

import warnings

import numpy as np
import pytest
import torch

from tilenet.errors import TilenetError
from tilenet.model.inputs import standardise

MEAN, STD = (120.5, -3.25, 7.0), (33.0, 0.125, 0.0)


def pixels(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    values = (rng.normal(20, 30, (3, 6, 9)) % 200).astype(dtype)
    values[2] = 7  # a band that says nothing
    return values, rng.random((6, 9)) < 0.7


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "float32", "float64"])
@pytest.mark.parametrize("precision", [torch.float32, torch.float64, torch.bfloat16])
def test_bands_are_standardised_and_nodata_is_0(dtype: str, precision: torch.dtype) -> None:
    values, valid = pixels(dtype)
    if dtype[0] == "f":
        values[:, ~valid] = np.nan
    found = standardise(values, valid, MEAN, STD, precision)
    assert found.dtype == (torch.float64 if precision == torch.float64 else torch.float32)
    assert found.shape == (1, 3, 6, 9)
    assert found.is_contiguous()
    rounding = 1e-15 if precision == torch.float64 else 3e-7
    mean, scale = np.array(MEAN)[:, None, None], np.array([33.0, 0.125, 1.0])[:, None, None]
    exact = values.astype(np.float64)
    wanted = np.where(valid, (exact - mean) / scale, 0.0)
    size = np.where(valid, np.maximum(np.abs(exact), np.abs(mean)) / scale, 0.0)
    assert (np.abs(found[0].double().numpy() - wanted) <= rounding * size).all()


def test_blocks_change_no_bit() -> None:
    rng = np.random.default_rng(4)
    values = rng.integers(0, 4000, (2, 70, 1001)).astype(np.uint16)
    valid = rng.random((70, 1001)) < 0.9
    whole = standardise(values, valid, (1999.9, 2001.3), (1100.1, 0.7), torch.float32)
    for top in range(0, 70, 9):
        rows = slice(top, top + 9)
        part = standardise(
            values[:, rows], valid[rows], (1999.9, 2001.3), (1100.1, 0.7), whole.dtype
        )
        assert torch.equal(part, whole[:, :, rows])
    mean = np.array([1999.9, 2001.3], np.float32)[:, None, None]
    rest = (np.array([1999.9, 2001.3])[:, None, None] - mean).astype(np.float32)
    scale = np.array([1100.1, 0.7], np.float32)[:, None, None]
    wanted = np.where(valid, (values.astype(np.float32) - mean - rest) / scale, 0)
    assert np.array_equal(whole[0].numpy(), wanted)


def test_a_constant_band_becomes_0_and_other_values_of_it_stay_finite() -> None:
    values, valid = pixels("uint8")
    values[2, 3, 4], valid[3, 4] = 9, True
    found = standardise(values, valid, MEAN, STD, torch.float64)[0, 2]
    assert found[3, 4] == 2
    found[3, 4] = 0
    assert not found.any()


def test_float64_pixels_keep_their_digits() -> None:
    values, valid = pixels("float64")
    values += 1e9
    found = standardise(values, valid, (1e9, 1e9, 1e9), (1.0, 1.0, 1.0), torch.float64)
    assert np.array_equal(found[0].numpy(), np.where(valid, values - 1e9, 0))


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "float64"])
def test_float32_networks_see_small_differences_of_large_numbers(dtype: str) -> None:
    values, valid = pixels("int64")
    values = (values + 10**9).astype(dtype)
    mean = (1e9 + 20.3, 1e9, 1e9)
    found = standardise(values, valid, mean, (30.0, 1.0, 7.0), torch.float32)[0].numpy()
    exact = np.where(valid, values.astype(np.float64) - np.array(mean)[:, None, None], 0)
    exact /= np.array([30.0, 1.0, 7.0])[:, None, None]
    assert np.abs(found - exact).max() < 1e-6 * np.abs(exact).max()


@pytest.mark.parametrize(
    ("size", "std", "precision"),
    [(1e200, 1e200, torch.float32), (3e38, 1.0, torch.float32), (1.5e308, 1.0, torch.float64)],
)
def test_pixels_that_the_network_cannot_hold_are_refused_without_a_warning(
    size: float, std: float, precision: torch.dtype
) -> None:
    values, valid = pixels("float64")
    values *= size / np.abs(values).max()
    values[1, 2, 3], valid[2, 3] = -size, True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TilenetError, match=r"pixels must fit float\d\d when .*; name a value"):
            standardise(values, valid, (size / 2, size, 0.0), (std / 4,) * 3, precision)


def test_deviations_that_the_network_cannot_hold_are_refused() -> None:
    values, valid = pixels("float64")
    deviations = 1.0, 2e-60, 1.0
    with pytest.raises(TilenetError, match=r"deviation must fit float32 \(std: 2e-60\); scale"):
        standardise(values * 1e-60, valid, (0.0, 0.0, 0.0), deviations, torch.float32)
    found = standardise(values * 1e-60, valid, (0.0, 0.0, 0.0), (2e-60,) * 3, torch.float64)
    wanted = torch.from_numpy(np.where(valid, values / 2, 0))
    torch.testing.assert_close(found[0], wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_pixels_without_data_may_be_as_large_as_they_like(precision: torch.dtype) -> None:
    values, valid = pixels("float64")
    small = standardise(values, valid, MEAN, (0.3, 0.4, 0.5), precision)
    values[:, ~valid] = -1.7976931348623157e308
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = standardise(values, valid, MEAN, (0.3, 0.4, 0.5), precision)
    assert torch.equal(found, small)


def test_the_pixels_themselves_are_left_alone() -> None:
    values, valid = pixels("float32")
    before = values.copy()
    standardise(values, valid, MEAN, STD, torch.float32).mul_(3)
    assert np.array_equal(values, before)
