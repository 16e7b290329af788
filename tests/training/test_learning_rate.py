"""Rates are those of torch's schedulers, from the step alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from tilenet.training.learning_rate import LearningRate, ScheduleName

LR, STEPS = 0.3, 23


@pytest.mark.parametrize(
    ("ours", "theirs", "arguments"),
    [
        ((), lr_scheduler.ConstantLR, (1.0,)),
        (("poly", 0.9), lr_scheduler.PolynomialLR, (STEPS, 0.9)),
        (("poly", 2.5), lr_scheduler.PolynomialLR, (STEPS, 2.5)),
        (("cosine", 1, 0, (), 0.1, 0.01), lr_scheduler.CosineAnnealingLR, (STEPS, 0.01)),
        (("step", 1, 0, (4, 9, 20), 0.3), lr_scheduler.MultiStepLR, ([4, 9, 20], 0.3)),
    ],
    ids=["constant", "poly", "steep poly", "cosine", "step"],
)
def test_rates_are_torchs(
    ours: tuple[Any, ...], theirs: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    rates = LearningRate(LR, STEPS, *ours)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], LR)
    scheduler = theirs(optimizer, *arguments)
    backwards = [rates.at(step) for step in reversed(range(STEPS))]
    for rate in backwards[::-1]:
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        scheduler.step()


@given(
    st.sampled_from(["constant", "poly", "cosine", "step"]),
    st.integers(1, 60),
    st.integers(0, 60),
    st.floats(0, 0.3),
)
def test_rates_rise_to_lr_and_never_again(
    name: ScheduleName, steps: int, warmup: int, min_lr: float
) -> None:
    milestones = (warmup + 2, warmup + 5)
    rates = LearningRate(LR, steps, name, 1.5, warmup, milestones, 0.5, min_lr)
    found = [rates.at(step) for step in range(max(steps, warmup + 1))]
    rising, falling = found[: warmup + 1], found[warmup:]
    wanted = [LR * (step + 1) / (warmup + 1) for step in range(warmup + 1)]
    assert rising == pytest.approx(wanted, rel=1e-12)
    assert falling == sorted(falling, reverse=True)
    assert min(falling) >= min_lr * (1 - 1e-12)


@pytest.mark.parametrize("name", ["poly", "cosine"])
def test_poly_and_cosine_end_at_their_least(name: ScheduleName) -> None:
    rates = LearningRate(LR, STEPS, name, warmup_steps=3, min_lr=0.02)
    assert rates.at(STEPS) == rates.at(STEPS + 7) == pytest.approx(0.02, rel=1e-12)
    assert rates.at(STEPS - 1) > 0.02 * (1 + 1e-4)
    assert rates.at(3) == LR
