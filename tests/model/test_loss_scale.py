"""The scale of the loss stays a power of two, within bounds, and follows overflows."""

import random

import pytest

from tilenet.errors import TilenetError
from tilenet.model import loss_scale as module
from tilenet.model.loss_scale import LossScale


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
def test_other_precisions_are_not_scaled_and_not_watched(precision: str) -> None:
    scale = LossScale.of(precision)
    assert (scale.value, scale.most) == (1.0, 1.0)


def test_float16_is_watched() -> None:
    scale = LossScale.of("float16")
    assert scale.most > 1
    assert module.SMALLEST < scale.value < scale.most


def test_an_overflow_halves_and_starts_the_count_anew() -> None:
    scale = LossScale(2.0**10, 2.0**24, calm_steps=module.PATIENCE - 1)
    scale.overflowed()
    assert (scale.value, scale.calm_steps) == (2.0**9, 0)
    for _ in range(module.PATIENCE - 1):
        scale.went_well()
    assert scale.value == 2.0**9
    scale.went_well()
    assert (scale.value, scale.calm_steps) == (2.0**10, 0)


def test_it_stays_a_power_of_two_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 3)
    scale, rng, seen = LossScale.of("float16"), random.Random(7), set()
    for chance in (0.02, 0.45):  # first it grows to the largest, then falls to the smallest
        for _ in range(400):
            if rng.random() > chance:
                scale.went_well()
            elif scale.value > module.SMALLEST:
                scale.overflowed()
            seen.add(scale.value)
            assert scale.value.hex().startswith("0x1.0000000000000p")
    assert min(seen) == module.SMALLEST
    assert max(seen) == scale.most


def test_no_scale_is_small_enough() -> None:
    scale = LossScale.of("float16")
    for _ in range(24):
        scale.overflowed()
    with pytest.raises(TilenetError, match=r"float16 must hold the gradients .*float32"):
        scale.overflowed()
    assert scale.value == module.SMALLEST


@pytest.mark.parametrize(
    ("value", "calm_steps"),
    [(0, 3), (2.0**25, 3), (-1.0, 3), (True, 3), (1.0, 2000), (1.0, -1), (None, 0), ("1", 0)],
)
def test_what_is_no_scale_is_not_restored(value: object, calm_steps: object) -> None:
    scale = LossScale.of("float16")
    with pytest.raises(TilenetError, match="a loss scale lies between"):
        scale.restore(value, calm_steps)


def test_a_scale_is_restored() -> None:
    scale = LossScale.of("float16")
    scale.restore(2.0**-7, 1999)
    assert (scale.value, scale.calm_steps) == (2.0**-7, 1999)
    scale.went_well()
    assert (scale.value, scale.calm_steps) == (2.0**-6, 0)
