"""A module whose result follows from more than its image and weights is refused."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from one_idea import Around
from torch import Tensor, nn

from tilenet.adoption.adopt import adopt
from tilenet.errors import TilenetError


class Counts(nn.Module):
    """Another function from its hundredth call on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.calls = nn.Conv2d(3, 4, 3, padding=1), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.conv(x).relu() if self.calls > 100 else self.conv(x)


class Remembers(nn.Module):
    """Adds the map of the call before, where it has the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3, padding=1), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        y = x + self.last if self.last.shape == x.shape else x
        self.last = x.detach()
        return y


class BoundedConv(nn.Conv2d):
    """Its weights are replaced by shorter ones, where they are longer than 100 (EEGNet)."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 100.0)
        return super().forward(x)


def drops(draw: Callable[[], float]) -> nn.Module:
    """A block that is left out at random, so rarely that no proof sees it."""
    return Around(lambda m, x: x if m.training and draw() < 1e-6 else x + x.relu())


class Holds(nn.Module):
    """A generator that the module holds by itself."""

    def __init__(self, generator: random.Random | np.random.Generator) -> None:
        super().__init__()
        self.conv, self.generator = nn.Conv2d(3, 4, 3, padding=1), generator

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return x if self.generator.random() < 1e-6 else x.relu()


UNSTEADY = {
    "a counter": (Counts, "calls changes"),
    "the map before": (Remembers, "what it keeps of an image changes"),
    "a weight that is replaced": (
        lambda: nn.Sequential(BoundedConv(3, 4, 3, padding=1), nn.ReLU()),
        "the tensor of 0.weight changes",
    ),
    "random": (lambda: drops(random.random), "Python's or numpy's random numbers changes"),
    "numpy": (lambda: drops(np.random.rand), "Python's or numpy's random numbers changes"),
    "a generator of Python": (lambda: Holds(random.Random(0)), "generator changes"),
    "a generator of numpy": (lambda: Holds(np.random.default_rng(0)), "generator changes"),
}


@pytest.mark.parametrize("name", UNSTEADY)
def test_what_changes_from_call_to_call_is_refused(name: str) -> None:
    make, words = UNSTEADY[name]
    with pytest.raises(TilenetError, match=words):
        adopt(make(), 3)


class Notes(nn.Module):
    """Notes what it has seen, which is the same for the same image, and keeps a map to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rows, self.seen = nn.Conv2d(3, 4, 3, padding=1), 0, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.rows, self.seen = x.shape[2], self.conv(x).detach()
        return F.interpolate(self.conv(x), size=(self.rows, x.shape[3]))


def test_what_is_noted_of_an_image_is_not_refused() -> None:
    assert adopt(Notes(), 3).bands == 3


class Looks(nn.Module):
    """Counts its calls and holds a number that is none, neither of which decides anything."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.calls, self.nodata = nn.Conv2d(3, 4, 3, padding=1), 0, float("nan")

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.conv(x)


def test_what_is_counted_for_nothing_is_not_refused() -> None:
    module = Looks()
    assert adopt(module, 3).bands == 3
    assert module.calls == 0


class RemembersInEvaluation(Remembers):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if self.training else super().forward(x)


def test_what_changes_in_evaluation_alone_is_refused() -> None:
    with pytest.raises(TilenetError, match="what it keeps of an image changes"):
        adopt(RemembersInEvaluation(), 3)


def test_running_statistics_stay_those_of_the_module() -> None:
    """Their update in the two runs is none of the list's."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    assert adopt(network, 3, "step").state["1.running_mean"].eq(0).all()
