"""All classes that occur weigh the same, and all together as much as without weights."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilenet.data.class_weights import balanced_weights


@given(st.lists(st.integers(0, 10**9), min_size=2).filter(any))
def test_classes_weigh_the_same(class_pixels: list[int]) -> None:
    weights = balanced_weights(class_pixels)
    sums = [weight * count for weight, count in zip(weights, class_pixels, strict=True)]
    assert sum(sums) == pytest.approx(sum(class_pixels), rel=1e-12)
    there = [one for one, count in zip(sums, class_pixels, strict=True) if count]
    assert there == pytest.approx([there[0]] * len(there), rel=1e-12)
    assert [w == 0 for w in weights] == [count == 0 for count in class_pixels]


def test_twice_as_rare_weighs_twice_as_much() -> None:
    assert balanced_weights([400, 0, 200, 100]) == (700 / 1200, 0.0, 700 / 600, 700 / 300)
