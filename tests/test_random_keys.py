"""Keyed random numbers: the same forever, and uniform."""

import hashlib

import numpy as np
import pytest

from tilenet.random_keys import key, sixteen_bits, uniform

# Runs of older versions go on to the same numbers, so these never change.
GOLDEN_KEYS = {
    (): 0x7076A68E75884D4E40BDEFD94169E6CA,
    (0,): 0x6CF5883A657A59E660B1034468A44012,
    (1, 2, 3): 0x824C30811F549D4B370C5710D4F4B59D,
    (12, "3"): 0x74360FFD51C98159ED0BBCBDC024BE5E,
    (7, "dropout", 4, 2, 9): 0xCD2A8067D5C021D2E188FF5A6A8FD03A,
    (-1, "é"): 0xD5CBF90B16A6B685B47BEAA78F6136B1,
}
GOLDEN_NUMBERS = {
    (0,): ["0x1.30b26f3a88a4dp-1", "0x1.f6cf7536ffa6cp-3", "0x1.46670eb144d08p-1"],
    (7, "dropout", 4, 2, 9): ["0x1.59e98bbf56338p-3", "0x1.a84a5c5a0f7fcp-2"],
    (2**70, "order", -5): ["0x1.96ccc3236de00p-6", "0x1.cf8a494282856p-2"],
}

GOLDEN_BITS = {
    (0,): [28484, 17490, 14237, 39001, 55802, 57332, 61094, 16089],
    (2**70, "order", -5): [33761, 36279, 13068, 1627, 24452, 41121, 37456, 29666],
}


@pytest.mark.parametrize("parts", GOLDEN_KEYS, ids=str)
def test_keys_never_change(parts: tuple[int | str, ...]) -> None:
    assert key(*parts) == GOLDEN_KEYS[parts]


@pytest.mark.parametrize("parts", GOLDEN_NUMBERS, ids=str)
def test_numbers_never_change(parts: tuple[int | str, ...]) -> None:
    wanted = GOLDEN_NUMBERS[parts]
    assert [float(x).hex() for x in uniform(len(wanted), *parts)] == wanted


def test_a_key_is_blake2b_of_its_parts() -> None:
    digest = hashlib.blake2b(b"3,crop,17", digest_size=16).digest()
    assert key(3, "crop", 17) == int.from_bytes(digest, "little")


def test_more_numbers_begin_with_the_same_ones() -> None:
    many = uniform(1000, 5, "a")
    assert np.array_equal(uniform(7, 5, "a"), many[:7])
    assert len(np.unique(many)) == 1000


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4, 5, 7, 8, 998])
def test_numbers_further_on_are_those_of_the_whole(first: int) -> None:
    assert np.array_equal(uniform(9, 5, "a", first=first), uniform(1007, 5, "a")[first : first + 9])

    bits = sixteen_bits(1007, 5, "a")
    assert np.array_equal(sixteen_bits(9, 5, "a", first=first), bits[first : first + 9])


@pytest.mark.parametrize("parts", GOLDEN_BITS, ids=str)
def test_sixteen_bits_never_change_and_are_those_of_the_numbers(
    parts: tuple[int | str, ...],
) -> None:
    bits = sixteen_bits(44, *parts)
    assert bits[:8].tolist() == GOLDEN_BITS[parts]
    # A number has the upper 53 bits of 64.
    words = (uniform(11, *parts) * 2.0**53).astype(np.uint64)
    assert np.array_equal(bits[3::4], words >> 37)
    assert np.array_equal(bits[1::4], words >> 5 & 0xFFFF)


def test_each_part_counts() -> None:
    first = [(1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3), (1, 2), (1, 2, 3, 0), (12, 3), (3, 2, 1)]
    assert len({uniform(1, *parts)[0] for parts in first}) == len(first)


def draws(way: str) -> np.ndarray:
    """20 000 numbers: of one key, or the first ones of neighbouring keys."""
    if way == "one key":
        return uniform(20_000, 3, "x")
    return np.array([uniform(1, 3, "x", number)[0] for number in range(20_000)])


@pytest.mark.parametrize("way", ["one key", "neighbouring keys"])
def test_numbers_are_uniform_and_neighbours_independent(way: str) -> None:
    numbers = draws(way)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
    expected = len(numbers) / 64
    # chi² with 63 degrees of freedom has a standard deviation of √126; five of them
    assert abs(((counts - expected) ** 2 / expected).sum() - 63) < 5 * 126**0.5
    pairs = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(pairs) < 5 / len(numbers) ** 0.5
    low_bits = (numbers * 2**53).astype(np.int64) & 1
    assert abs(low_bits.mean() - 0.5) < 5 * 0.5 / len(numbers) ** 0.5
