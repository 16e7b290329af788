"""Percentiles against numpy's over all values at once, however the values are cut and merged."""

import math
from fractions import Fraction
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilenet.data import histogram as module
from tilenet.data.histogram import ValueCounts, count_values, merge_counts

PERCENTS = (0, 1, 2, 25, 50, 75, 98, 100)
WHOLE = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
REAL = ["float16", "float32", "float64"]


def some_values(dtype: str, count: int, seed: int) -> np.ndarray:
    """Of both signs where there are any, many of them several times."""
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        values = rng.normal(scale=10.0 ** rng.integers(-2, 3, count)).astype(dtype)
        values[rng.random(count) < 0.1] = 0.0
        values[rng.random(count) < 0.05] = -0.0
        return values
    info = np.iinfo(dtype)
    low, high = max(info.min, -(10**9)), min(info.max, 10**9)
    return rng.integers(low, high, count).astype(dtype)


def same(first: ValueCounts, second: ValueCounts) -> bool:
    plain = (first.dtype, first.shift, first.ends) == (second.dtype, second.shift, second.ends)
    codes = np.array_equal(first.codes, second.codes)
    return plain and codes and np.array_equal(first.counts, second.counts)


@pytest.mark.parametrize("dtype", [*WHOLE, *REAL])
def test_percentiles_are_those_of_all_values(dtype: str) -> None:
    values = some_values(dtype, 5001, 1)
    found = count_values(values)
    assert (found.shift, found.total) == (0, 5001)
    assert (found.minimum, found.maximum) == (values.min(), values.max())
    wanted = np.percentile(values, PERCENTS, method="inverted_cdf")
    assert found.percentiles(PERCENTS) == tuple(float(value) for value in wanted)


@given(
    st.sampled_from(["int16", "float32", "int32", "float64"]),
    st.integers(1, 400),
    st.integers(1, 6),
    st.integers(1, 60),
    st.integers(0, 999),
)
def test_parts_merged_in_any_order_are_the_whole(
    dtype: str, count: int, parts: int, most_bins: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = some_values(dtype, count, seed)
    values[: count // 3] = values[0] + np.arange(count // 3).astype(dtype)  # close together too
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_BINS", most_bins)
        whole = count_values(values)
        pieces = [count_values(part) for part in np.array_split(values, parts)]
        pieces.append(count_values(values[:0]))
        order = rng.permutation(len(pieces))
        assert same(reduce(merge_counts, [pieces[n] for n in order]), whole)
        middle = len(pieces) // 2
        halves = [reduce(merge_counts, some) for some in (pieces[:middle], pieces[middle:]) if some]
        assert same(reduce(merge_counts, halves[::-1]), whole)
        assert len(whole.codes) <= most_bins
        assert whole.total == count


@pytest.mark.parametrize("dtype", ["int32", "float32", "float64"])
def test_bins_are_as_narrow_as_is_said(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BINS", 512)
    rng = np.random.default_rng(2)
    if dtype == "int32":
        values = rng.integers(-5_000, 1_000_000, 40_000).astype(dtype)
        bound = np.full(len(PERCENTS), np.ptp(values) / 512)  # half of R / (512 / 2)
    else:
        values = (2.0 ** rng.uniform(3, 8, 40_000)).astype(dtype)  # 5 octaves
        bound = np.percentile(values, PERCENTS) * 5 / 512
    found = count_values(values)
    assert found.shift > 0
    assert (found.minimum, found.maximum) == (values.min(), values.max())
    wanted = np.percentile(values, PERCENTS, method="inverted_cdf").astype(np.float64)
    off = np.abs(np.array(found.percentiles(PERCENTS)) - wanted)
    assert (off <= bound).all()
    assert off.any()


def test_no_more_bits_are_dropped_than_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(1000, dtype=np.int32) * 3
    monkeypatch.setattr(module, "MOST_BINS", 1000)
    assert count_values(values).shift == 0
    monkeypatch.setattr(module, "MOST_BINS", 999)
    assert count_values(values).shift == 2  # with one less all differ still


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16"])
def test_mean_and_deviation_are_those_of_whole_numbers(dtype: str) -> None:
    info = np.iinfo(dtype)
    values = np.random.default_rng(3).integers(info.max - 9, info.max + 1, 5000).astype(dtype)
    values[::7] = info.min
    found = reduce(merge_counts, [count_values(part) for part in np.array_split(values, 3)])
    exact = [Fraction(int(value)) for value in values]
    mean = sum(exact) / 5000
    square = sum((value - mean) ** 2 for value in exact) / 5000
    assert found.mean_and_std == (float(mean), math.sqrt(square))


@pytest.mark.parametrize("most_span", [0, 1 << 26])
@pytest.mark.parametrize("dtype", ["int32", "float32", "float64"])
def test_counting_by_place_and_with_fewer_bits_change_nothing(
    dtype: str, most_span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_BINS", 300)
    rng = np.random.default_rng(4)
    parts = [(rng.normal(size=4000) * 3000 + 1e5).astype(dtype) for _ in range(3)]
    whole = count_values(np.concatenate(parts))
    assert whole.shift > 0
    monkeypatch.setattr(module, "MOST_SPAN", most_span)
    found = count_values(parts[0])
    for part in parts[1:]:
        assert found.shift > 0
        found = merge_counts(found, count_values(part, found.shift))
    assert same(found, whole)


def test_zero_has_no_sign() -> None:
    found = count_values(np.array([0.0, -0.0, 2.5, -0.0]))
    assert found.counts.tolist() == [3, 1]
    assert not np.signbit([found.minimum, *found.percentiles([50])]).any()


def test_wide_numbers_with_few_values_are_counted_each() -> None:
    values = np.array([-2.5e300, 7e-300, 7e-300, 1e9 + 0.25, 3.0])
    wanted = (-2.5e300, 7e-300, 7e-300, 3.0, 1e9 + 0.25)
    assert count_values(values).percentiles([20, 40, 60, 80, 100]) == wanted
