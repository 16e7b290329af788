"""Bytes of tall parts from those of low ones are those of a walk over all strips."""

import random

import pytest
from test_trained_bytes import AVERAGED, built

from tilenet.geometry.halo import context_of
from tilenet.planning.balance import likely_balance
from tilenet.planning.memory.sweeps import tall_parts
from tilenet.planning.memory.sweeps.swept_partitions import partition_peaks
from tilenet.planning.memory.sweeps.trained_sweeps import ALL_CELLS, trained_bytes

NAMES = "nearest", "transposed", "between", "resized", *AVERAGED


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_all_strips(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, _ = built(name)
    rng, unit = random.Random(name), context_of(layers).alignment_px

    def count(height: int, rows: int) -> list[object]:
        size = height, 96
        counted: list[object] = [
            trained_bytes.__wrapped__(layers, *size, rows, 4, most_cells)
            for most_cells in ((0, 200_000, ALL_CELLS) if name in AVERAGED else (0,))
        ]
        if name not in AVERAGED:
            balance = likely_balance(layers, size, 2)
            counted.append(partition_peaks.__wrapped__(layers, *size, rows, 4, balance))
        return counted

    for _ in range(3):
        rows = unit * rng.randint(1, max(1, 96 // unit))
        height = rows * rng.randint(24, 70) + unit * rng.randrange(rows // unit)
        extrapolated = count(height, rows)
        with monkeypatch.context() as patch:
            patch.setattr(tall_parts, "FEW", height)
            assert count(height, rows) == extrapolated


def test_a_part_of_any_height_takes_no_longer() -> None:
    layers, _ = built("nearest")
    low, high = (trained_bytes(layers, 64 * count, 96, 64, 4) for count in (1_000, 1_000_000))
    assert low < high < 1_000 * low
