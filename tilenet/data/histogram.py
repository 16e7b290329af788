"""How often each value occurs: percentiles in one pass over any number of pixels, in little memory.

Values are counted by their *code*, an unsigned number in the order of the values: an integer's
distance from the smallest of its dtype, a float's bits with the sign turned so that they sort. All
values of up to 16 bits are counted each. Of wider dtypes too, as long as no more than `MOST_BINS`
occur; else the lowest bits of all codes are dropped, as few as are needed. How many that are
follows from the values alone, since a set has no fewer codes than its parts, whatever is dropped.
So the counts, and all that follows from them, are the same to the last bit however pixels are cut
into parts and in whatever order the parts are merged.

A bin then holds 2^shift neighbouring numbers. Floats spread over E octaves (counted once per sign)
fill bins of at most E / 32768 of their value, integers over a range R bins of at most R / 32768;
a percentile is a bin's middle, so at most half of that off the true one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MOST_BINS", "ValueCounts", "count_values", "counts_each", "merge_counts"]

MOST_BINS = 1 << 16
MOST_SPAN = 1 << 21  # of codes that are counted by their place; wider ones are sorted


def counts_each(dtype: np.dtype[Any]) -> bool:
    """Whether all values of a dtype are counted each, and are whole numbers."""
    return dtype.kind in "ui" and dtype.itemsize <= 2


@dataclass(frozen=True)
class ValueCounts:
    """Counts of the values of one band.

    Attributes:
        dtype: Dtype of the values.
        shift: Lowest bits of a code that were dropped; 0: each value is counted by itself.
        codes: (N,), rising, with those bits dropped.
        counts: (N,), of each.
        ends: Codes of the smallest and the largest value, with all bits; None: there are none.
    """

    dtype: np.dtype[Any]
    shift: int
    codes: NDArray[np.uint64]
    counts: NDArray[np.int64]
    ends: tuple[int, int] | None

    @property
    def total(self) -> int:
        """Values that were counted."""
        return int(self.counts.sum())

    @property
    def minimum(self) -> float:
        """The smallest value; there must be one."""
        assert self.ends is not None
        return _value(self.ends[0], self.dtype)

    @property
    def maximum(self) -> float:
        """The largest value; there must be one."""
        assert self.ends is not None
        return _value(self.ends[1], self.dtype)

    @property
    def mean_and_std(self) -> tuple[float, float]:
        """Of all values, correctly rounded; they are counted each, and there must be one."""
        assert counts_each(self.dtype)
        assert self.shift == 0
        lowest = int(np.iinfo(self.dtype).min)
        first = second = 0
        # Python's whole numbers: squares of 16 bits times pixels do not fit 64.
        for code, count in zip(self.codes.tolist(), self.counts.tolist(), strict=True):
            value = code + lowest
            first += count * value
            second += count * value * value
        total = self.total
        return first / total, math.sqrt((total * second - first * first) / total**2)

    def percentiles(self, percents: Sequence[int]) -> tuple[float, ...]:
        """Percentiles: the smallest values that these shares of all are not above.

        There must be a value. numpy's `inverted_cdf`: values that occur, never something between
        two. Where bins hold several values, the middle of the bin, see above.
        """
        upto = self.counts.cumsum()
        # In whole numbers: a product of floats may round across a rank.
        ranks = [max(1, -(-percent * self.total // 100)) for percent in percents]
        places = np.searchsorted(upto, ranks)
        return tuple(self._middle(int(self.codes[place])) for place in places)

    def _middle(self, code: int) -> float:
        assert self.ends is not None
        first, last = code << self.shift, (code + 1 << self.shift) - 1
        low, high = max(first, self.ends[0]), min(last, self.ends[1])
        low_value, high_value = _value(low, self.dtype), _value(high, self.dtype)
        return low_value if low == high else low_value / 2 + high_value / 2


def count_values(values: NDArray[Any], least_shift: int = 0) -> ValueCounts:
    """Count the values (N,) of one band: finite real numbers of one dtype.

    Args:
        least_shift: Bits that are dropped at once: as many as counts that these are merged with
            have dropped make it faster, and change nothing there.
    """
    dtype = values.dtype
    codes = _codes(values)
    if dtype.itemsize <= 2:
        every = np.bincount(codes, minlength=1)
        found = np.flatnonzero(every)
        return _fitted(dtype, 0, found.astype(np.uint64), every[found], None)
    if not len(codes):
        return _fitted(dtype, 0, np.empty(0, np.uint64), np.empty(0, np.int64), None)
    ends = int(codes.min()), int(codes.max())
    first, last = (code >> least_shift for code in ends)
    codes = codes >> codes.dtype.type(least_shift)
    if last - first < MOST_SPAN:
        every = np.bincount((codes - codes.dtype.type(first)).astype(np.int64))
        found = np.flatnonzero(every)
        counts = every[found]
        found = found.astype(np.uint64) + np.uint64(first)
    else:
        found, counts = np.unique(codes, return_counts=True)
    return _fitted(dtype, least_shift, found.astype(np.uint64), counts.astype(np.int64), ends)


def merge_counts(first: ValueCounts, second: ValueCounts) -> ValueCounts:
    """Counts of both sets together; they are of one dtype."""
    if first.ends is None or second.ends is None:
        return second if first.ends is None else first
    shift = max(first.shift, second.shift)
    parts = [part.codes >> np.uint64(shift - part.shift) for part in (first, second)]
    codes = np.concatenate(parts)
    counts = np.concatenate([first.counts, second.counts])
    ends = min(first.ends[0], second.ends[0]), max(first.ends[1], second.ends[1])
    order = np.argsort(codes, kind="stable")
    return _fitted(first.dtype, shift, codes[order], counts[order], ends)


def _fitted(
    dtype: np.dtype[Any],
    shift: int,
    codes: NDArray[np.uint64],
    counts: NDArray[np.int64],
    ends: tuple[int, int] | None,
) -> ValueCounts:
    """Join equal codes (in order), and drop as many bits as `MOST_BINS` asks for."""
    if ends is None and len(codes):
        ends = int(codes[0]), int(codes[-1])
    drop = 0
    while _distinct(codes, drop) > MOST_BINS:
        drop += 1
    codes = codes >> np.uint64(drop)
    firsts = np.flatnonzero(np.diff(codes, prepend=codes[:1] + np.uint64(1)))
    joined = np.add.reduceat(counts, firsts) if len(codes) else counts
    return ValueCounts(dtype, shift + drop, codes[firsts], joined, ends)


def _distinct(codes: NDArray[np.uint64], drop: int) -> int:
    """Different codes of those in order, once `drop` bits are gone."""
    if len(codes) <= MOST_BINS:
        return len(codes)
    short = codes >> np.uint64(drop)
    return 1 + int(np.count_nonzero(short[1:] != short[:-1]))


def _codes(values: NDArray[Any]) -> NDArray[Any]:
    """Unsigned numbers in the order of the values."""
    dtype = values.dtype
    unsigned = np.dtype(f"u{dtype.itemsize}")
    if dtype.kind == "u":
        return values
    sign = unsigned.type(1 << (8 * dtype.itemsize - 1))
    if dtype.kind == "i":
        return np.asarray(values.view(unsigned) ^ sign)
    bits = (values + dtype.type(0)).view(unsigned)  # −0 becomes 0
    # A negative number's bits rise as it falls.
    return np.asarray(np.where(bits & sign, ~bits, bits | sign))


def _value(code: int, dtype: np.dtype[Any]) -> float:
    """The value of a code."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    if dtype.kind == "u":
        return float(code)
    sign = 1 << (8 * dtype.itemsize - 1)
    if dtype.kind == "i":
        return float(code - sign)
    bits = code ^ sign if code & sign else ~code & (2 * sign - 1)
    return float(np.array(bits, unsigned).view(dtype))
