"""What operations take inside is measured, and counts for peaks only."""

from typing import Any

import pytest
import torch
from dry_run import dry_run, measured_run
from scratch import Scratch, allocated_peak

from tilenet.geometry.unet import UNetOptions, unet_layers

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("mode", ["always", "never"])
def test_the_allocators_peak_of_a_step_is_predicted(precision: str, mode: Any) -> None:
    layers = unet_layers(UNetOptions(poolings=2, base=8, bands=3, classes=3, dropout=0.1))
    step: Any = (layers, (101, 93), [20, len(layers) - 20], 3, mode, precision)
    predicted = dry_run(*step, one_device=True, scratch=Scratch(CPU)).total
    peak = allocated_peak(lambda: measured_run(*step, one_device=True, count=False), CPU)
    assert predicted == pytest.approx(peak, rel=0.01)
    assert dry_run(*step, one_device=True).total < 0.97 * peak, "there is something to predict"
