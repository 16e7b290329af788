"""Bytes of the partitions of a sweep: what lives on each is what is predicted, and never more."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from partition_bytes import bytes_of_partitions
from test_trained_bytes import SIZE, built

from tilenet.geometry.sweep import Sweeps, strip_edges
from tilenet.planning.balance import likely_balance
from tilenet.planning.memory.sweeps import swept_partitions
from tilenet.planning.memory.sweeps.swept_partitions import partition_peaks

CASES = [
    ("nearest", 64, 3),
    ("bilinear", 32, 3),
    ("transposed", 32, 2),
    ("between", 64, 3),
]


def found_and_predicted(name: str, rows: int, partitions: int, slow: int | None) -> Any:
    layers, net = built(name)
    balance = likely_balance(layers, SIZE, partitions)
    sweeps = Sweeps(strip_edges(SIZE[0], rows))
    labels = torch.randint(0, 2, (1, *SIZE), dtype=torch.uint8)
    found = bytes_of_partitions(layers, net, sweeps, labels, balance, slow)
    return found, partition_peaks(layers, *SIZE, rows, 4, balance)


@pytest.mark.parametrize(("name", "rows", "partitions"), CASES)
def test_bytes_of_the_slowest(name: str, rows: int, partitions: int) -> None:
    for slow in range(partitions):
        found, predicted = found_and_predicted(name, rows, partitions, slow)
        assert 0 <= predicted[slow] / found[slow] - 1 <= 0.05


def test_threads_that_run_as_they_like_take_no_more() -> None:
    found, predicted = found_and_predicted("nearest", 32, 3, None)
    assert all(one <= most for one, most in zip(found, predicted, strict=True))


@pytest.mark.parametrize("wrong", ["rows that wait", "gradients that wait", "strips that wait"])
def test_what_waits_is_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the prediction is too low."""
    links: Callable[..., Any] = swept_partitions._links
    right = partition_peaks.__wrapped__

    def fewer(*args: Any) -> Any:
        own = links(*args)
        makers = dict.fromkeys(own.makers, 0) if wrong == "rows that wait" else own.makers
        readers = {n: [] for n in own.readers} if wrong == "gradients that wait" else own.readers
        behind = min(own.num_behind, 1) if wrong == "strips that wait" else own.num_behind
        return swept_partitions._Links(behind, makers, readers)

    layers, _ = built("nearest")
    case = (layers, *SIZE, 64, 4, likely_balance(layers, SIZE, 3))
    whole = right(*case)
    monkeypatch.setattr(swept_partitions, "_links", fewer)
    assert any(less < 0.95 * one for less, one in zip(right(*case), whole, strict=True))
