"""What operations take inside is measured, and counts for peaks only."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dry_run import dry_run, measured_run
from owned_bytes import OwnedBytes
from scratch import Scratch, allocated_peak
from torch._subclasses.fake_tensor import FakeTensorMode

from tilenet.geometry.unet import UNetOptions, unet_layers

CPU = torch.device("cpu")


def test_the_allocators_peak_is_that_of_the_work() -> None:
    kept = []

    def work() -> None:
        first = torch.ones(1000, 77)
        kept.append(torch.ones(300, 77))
        del first
        kept.append(torch.ones(500, 77))

    assert allocated_peak(work, CPU) == pytest.approx(1300 * 77 * 4, abs=512)


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_scratch_counts_for_the_peak_only(fake: bool) -> None:
    asked = []

    def scratch(func: Any, args: Any, kwargs: Any) -> int:
        asked.append(func)
        return 12_345 if func is torch.ops.aten.mul.Tensor else 0

    with FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.no_grad():
        x = torch.ones(1000)
        with OwnedBytes(scratch=scratch) as live:
            y = x * 2
            current = live.current
            z = y + 1
    assert live.peak == max(4000 + 12_345, 8000)
    assert current == 4000
    assert len(asked) >= 2
    del z


def test_a_kind_of_operation_is_measured_once() -> None:
    scratch = Scratch(CPU)
    measured = []
    measure = scratch._measure
    scratch._measure = lambda *call: measured.append(call[0]) or measure(*call)
    peaks = []
    for _ in range(2):
        with FakeTensorMode(), OwnedBytes(scratch=scratch) as live:
            x = torch.empty(1, 5, 61, 53, dtype=torch.float64)
            F.conv2d(x, torch.empty(7, 5, 3, 3, dtype=torch.float64), padding=1)
            peaks.append(live.peak)
    assert len(measured) == 1
    assert peaks[0] == peaks[1]
    maps = (5 + 7) * 61 * 53 * 8
    assert peaks[0] > maps + 5 * 7 * 9 * 8, "float64 convolutions lay out their windows"


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("mode", ["always", "never"])
def test_the_allocators_peak_of_a_step_is_predicted(precision: str, mode: Any) -> None:
    layers = unet_layers(UNetOptions(poolings=2, base=8, bands=3, classes=3, dropout=0.1))
    step: Any = (layers, (101, 93), [20, len(layers) - 20], 3, mode, precision)
    predicted = dry_run(*step, one_device=True, scratch=Scratch(CPU)).total
    peak = allocated_peak(lambda: measured_run(*step, one_device=True, count=False), CPU)
    assert predicted == pytest.approx(peak, rel=0.01)
    assert dry_run(*step, one_device=True).total < 0.97 * peak, "there is something to predict"
