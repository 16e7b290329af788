"""What a step asks of its device, and what it sends there."""

from pathlib import Path

import numpy as np
import pytest

from bench.speed.operations import WAITS, of_a_run
from tilenet.parallel.exchange import norm as norms
from tilenet.training.images.tile_reader import narrow


@pytest.mark.parametrize("kernels", [False, True])
def test_a_step_waits_once_and_is_few_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    """Once 26 waits and 3562 operations, on a CPU and on devices."""
    monkeypatch.setattr(norms, "kernels_pay", lambda device: kernels)
    found, given = of_a_run(tmp_path, 64)
    assert {name: found[name] for name in WAITS if found[name]} == {"tolist": 1}
    assert found.total() <= (740 if kernels else 1860)
    assert given == 64 * 64 * (4 * 4 + 1)  # four bands in float32, and labels


@pytest.mark.parametrize(
    ("least", "most", "kind"),
    [
        (0, 255, "uint8"),
        (-1, 5, "int16"),
        (0, 256, "int16"),
        (-100, 9, "int16"),
        (0, 40_000, "int64"),
    ],
)
def test_labels_have_as_few_bytes_as_hold_them(least: int, most: int, kind: str) -> None:
    labels = np.array([[least, 3], [most, 1]])
    found = narrow(labels)
    assert found.dtype == kind
    assert np.array_equal(found, labels)


def test_values_of_a_regression_are_left_as_they_are() -> None:
    values = np.array([[0.5, np.nan], [3.0, -1.0]])
    assert narrow(values) is values
