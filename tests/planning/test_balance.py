"""Balances are optimal: against every balance there is, on small random cases."""

import time
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from questions import every_balance

from tilenet.errors import TilenetError
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.planning.balance import (
    block_seconds,
    check_balance,
    least_bytes,
    least_time,
    likely_balance,
)
from tilenet.planning.machines.read import machine
from tilenet.planning.time.layer_time import LayerTime
from tilenet.planning.time.roofline import roofline

Matrix = NDArray[np.float64]


def bottleneck(matrix: Matrix, balance: tuple[int, ...]) -> float:
    cuts = np.cumsum((0, *balance))
    return max(float(matrix[a, b]) for a, b in pairwise(cuts))


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Matrix, Matrix, int]:
    """Seconds and bytes of blocks (any, many of them equal, some impossible), and partitions."""
    num_layers = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds = draw(st.integers(2, 40))  # few different values: many ties
    seconds, num_bytes = rng.integers(1, kinds, (2, num_layers + 1, num_layers + 1)) / 7.0
    holes = draw(st.sampled_from([0, 0.1, 0.5]))
    for matrix in (seconds, num_bytes):
        matrix[rng.random(matrix.shape) < holes] = np.inf
    return seconds, num_bytes, draw(st.integers(1, min(num_layers, 5)))


@given(matrices(), st.integers(1, 7), st.sampled_from([None, 1.0, 3.0]))
def test_least_time_finds_the_best_of_all_balances(
    case: tuple[Matrix, Matrix, int], few: int, limit: float | None
) -> None:
    seconds, num_bytes, num_partitions = case
    every = every_balance(len(seconds) - 1, num_partitions)
    ranked = sorted(
        (bottleneck(seconds, balance), bottleneck(num_bytes, balance))
        for balance in every
        if bottleneck(num_bytes, balance) <= (np.inf if limit is None else limit)
    )
    ranked = [pair for pair in ranked if np.isfinite(pair).all()]
    found = least_time(seconds, num_partitions, num_bytes, limit, few)
    alone = sorted(s for b in every if np.isfinite(s := bottleneck(seconds, b)))
    assert [bottleneck(seconds, b) for b in least_time(seconds, num_partitions)] == alone[:4]
    assert len(set(found)) == len(found)
    pairs = [(bottleneck(seconds, b), bottleneck(num_bytes, b)) for b in found]
    assert pairs == ranked[:few]
    assert all(sum(b) == len(seconds) - 1 and len(b) == num_partitions for b in found)


@given(matrices(), st.integers(1, 7))
def test_least_bytes_finds_the_best_of_all_balances(
    case: tuple[Matrix, Matrix, int], few: int
) -> None:
    seconds, num_bytes, num_partitions = case
    every = every_balance(len(seconds) - 1, num_partitions)
    pairs = [(bottleneck(num_bytes, b), bottleneck(seconds, b)) for b in every]
    ranked = sorted(pair for pair in pairs if np.isfinite(pair).all())
    found = least_bytes(num_bytes, num_partitions, seconds, few)
    assert [(bottleneck(num_bytes, b), bottleneck(seconds, b)) for b in found] == ranked[:few]
    alone = sorted(b for b, _ in pairs if np.isfinite(b))[:few]
    assert [bottleneck(num_bytes, b) for b in least_bytes(num_bytes, num_partitions, few=few)] == (
        alone
    )


@pytest.mark.parametrize("num_partitions", [0, 6, 100])
def test_what_cannot_be_split_so_has_no_balance(num_partitions: int) -> None:
    rng = np.random.default_rng(3)
    assert least_time(rng.random((6, 6)), num_partitions) == []
    assert least_bytes(rng.random((6, 6)), num_partitions) == []


def test_nothing_fits_where_one_layer_is_too_large() -> None:
    sums = np.cumsum([0, 3, 5, 90, 2, 1, 4])
    num_bytes = sums[None] - sums[:, None]
    seconds = np.random.default_rng(8).random((7, 7))
    assert least_time(seconds, 3, num_bytes, limit_bytes=89) == []
    assert least_time(seconds, 3, num_bytes, limit_bytes=92) == [(2, 1, 3), (2, 2, 2)]
    # What is left beside a layer that takes longest is balanced too.
    times = [LayerTime(x, 0) for x in (90, 1, 3, 2, 2, 3, 1)]
    assert least_time(block_seconds(times), 3, few=1) == [(1, 3, 3)]


def test_block_seconds_are_sums_and_the_handing_over() -> None:
    rng = np.random.default_rng(4)
    times = [LayerTime(*rng.random(2)) for _ in range(11)]
    edges = rng.random(12)
    alone, handed = block_seconds(times), block_seconds(times, list(edges))
    for a in range(12):
        for b in range(12):
            if a >= b:
                assert alone[a, b] == handed[a, b] == np.inf
                continue
            total = sum(time.forward_s + time.backward_s for time in times[a:b])
            assert alone[a, b] == pytest.approx(total)
            moved = (edges[a] if a else 0) + (edges[b] if b < 11 else 0)
            assert handed[a, b] == pytest.approx(total + moved)


def test_it_takes_a_moment_only() -> None:
    rng = np.random.default_rng(6)
    times = [LayerTime(*10 ** rng.uniform(-3, 0, 2)) for _ in range(150)]
    seconds = block_seconds(times)
    num_bytes = seconds * rng.uniform(0.5, 2, seconds.shape)
    took_s = []
    for _ in range(5):
        start = time.perf_counter()
        found = least_time(seconds, 6, num_bytes, np.inf)
        took_s.append(time.perf_counter() - start)
        assert len(found) == 4
    assert min(took_s) < 0.05  # about 0.0015 on one core


@pytest.mark.parametrize(
    ("balance", "num_partitions", "said"),
    [
        ([3, 4], None, r"balance: \[3, 4\], sum: 7, layers: 9\); correct it by \+2"),
        ([9, 4], None, r"sum: 13, layers: 9\); correct it by -4"),
        ([4, 0, 5], None, r"every partition needs a layer \(balance: \[4, 0, 5\]\)"),
        ([4, -1, 6], None, "leave out the entries below 1"),
        ([4, 5], 3, r"\(balance: \[4, 5\], partitions: 3\); set partitions to 2"),
        ([1] * 10, None, r"\(layers: 9, partitions: 10\); ask for at most 9"),
        ([4, 5], 12, r"\(layers: 9, partitions: 12\); ask for at most 9"),
        ([], None, r"balance: \[\], sum: 0"),
    ],
)
def test_a_balance_that_does_not_split_the_network_is_refused(
    balance: list[int], num_partitions: int | None, said: str
) -> None:
    with pytest.raises(TilenetError, match=said):
        check_balance(balance, 9, num_partitions)


@pytest.mark.parametrize(("balance", "said"), [([4, 5], "3 to 4"), ([6, 3], "5 to 8")])
def test_a_balance_that_parts_layers_that_share_a_weight_is_refused(
    balance: list[int], said: str
) -> None:
    together = {"a": (3, 4), "b": (5, 8), "c": (2, 2)}
    with pytest.raises(TilenetError, match=rf"share a weight stay .* layers {said}\)"):
        check_balance(balance, 9, 2, together)
    for right in ([3, 2, 4], [2, 1, 2, 4], [5, 4]):
        check_balance(right, 9, None, together)


@pytest.mark.parametrize("num_partitions", [2, 3, 4])
def test_the_likely_balance_parts_no_layers_that_share_a_weight(num_partitions: int) -> None:
    layers = unet_layers(UNetOptions(poolings=1, convolutions=1, base=4))
    last = len(layers) - 1
    together = {"a": (2, 5), "b": (4, last - 2)}
    seconds = block_seconds(roofline(layers, 64, 96, "float32", machine("local")))
    balance = likely_balance(layers, (64, 96), num_partitions, together)
    cuts = {1, 2, last - 1, last}
    legal = [
        one
        for one in every_balance(len(layers), num_partitions)
        if cuts.issuperset([*accumulate(one)][:-1])
    ]
    assert bottleneck(seconds, balance) == min(bottleneck(seconds, one) for one in legal)
    check_balance(balance, len(layers), num_partitions, together)
    with pytest.raises(TilenetError, match=r"4 places, partitions: 6, b: .* at most 5 partitions"):
        likely_balance(layers, (64, 96), 6, together)


@pytest.mark.parametrize("num_partitions", [1, 2, 3, 5])
def test_where_nobody_names_a_balance_the_likely_one_is_the_fastest(num_partitions: int) -> None:
    layers = unet_layers(UNetOptions(poolings=1, convolutions=1, base=4))
    balance = likely_balance(layers, (64, 96), num_partitions)
    check_balance(balance, len(layers), num_partitions)
    seconds = block_seconds(roofline(layers, 64, 96, "float32", machine("local")))
    best = min(bottleneck(seconds, one) for one in every_balance(len(layers), num_partitions))
    assert bottleneck(seconds, balance) == best

    with pytest.raises(TilenetError, match=f"ask for at most {len(layers)} partitions"):
        likely_balance(layers, (64, 96), len(layers) + 1)
