"""Modules made from seeds are exact in one piece and in tiles, or refused in one sentence."""

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import referee
from grammar import generate
from referee import judge, mode_of
from shared_out import short_halo
from torch import Tensor, nn
from zoo import SUMS, Shifted, Sum

import tilenet
from tilenet.adoption.adopt import Adopted
from tilenet.geometry.layers import Conv, Layer

# `make fuzz` asks for more, and with another seed for others.
COUNT = int(os.environ.get("GENERATED_MODULES", "40"))
FIRST = int(os.environ.get("GENERATED_FROM", "0"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_module_is_exact_or_refused(seed: int) -> None:
    module = generate(seed)
    outcome = judge(module, mode_of(seed))
    assert outcome.kind in ("exact", "refused"), (
        f"seed {seed} ({mode_of(seed)}): {outcome.kind}, {outcome.words}\n{outcome.more}\n"
        f"{module.describe()}\npython tests/adoption/survey.py --from {seed} --count 1 --reduce"
    )


@pytest.mark.parametrize("name", SUMS)
def test_tiles_see_what_is_summed(name: str) -> None:
    outcome = judge(Sum(name), "step")
    assert outcome.kind == "exact", f"{outcome.words}\n{outcome.more}"


def test_a_map_that_is_shifted_and_shifted_back_is_padded() -> None:
    assert judge(Shifted(), "frozen").kind == "exact"


CHANGES: dict[str, Callable[[Adopted], Adopted]] = {
    "a weight": lambda one: replace(
        one, state={**one.state, "parts.0.bias": one.state["parts.0.bias"] + 1e-6}
    ),
    "an extra zero": lambda one: replace(one, layers=changed(one.layers, Conv, padding=0, extra=2)),
    "a dilation": lambda one: replace(one, layers=changed(one.layers, Conv, dilation=2, padding=2)),
}


def changed(layers: tuple[Layer, ...], kind: type[Layer], **values: int) -> tuple[Layer, ...]:
    """Layers of which the first of a kind is another one."""
    place = next(i for i, layer in enumerate(layers) if isinstance(layer, kind))
    return (*layers[:place], replace(layers[place], **values), *layers[place + 1 :])


class Small(nn.Module):
    """Two convolutions of 3 × 3."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.parts[1](self.parts[0](x).tanh())
        return out


@pytest.mark.parametrize("change", CHANGES)
def test_a_list_that_is_not_the_module_is_seen(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Small()
    adopted = tilenet.adopt(module, 3)
    assert judge(module, "frozen").kind == "exact"
    monkeypatch.setattr(tilenet, "adopt", lambda *_: CHANGES[change](adopted))
    assert judge(module, "frozen").kind == "failed"


@pytest.mark.parametrize("part", [nn.Dropout(0.4), nn.Dropout2d(0.4)])
def test_dropout_that_the_module_does_not_do_is_seen(
    part: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopted = tilenet.adopt(nn.Sequential(Small(), part), 3)
    assert judge(nn.Sequential(Small(), part), "frozen").kind == "exact"
    monkeypatch.setattr(tilenet, "adopt", lambda *_: adopted)
    outcome = judge(nn.Sequential(Small(), nn.Identity()), "frozen")
    assert outcome.words == "the list drops what the module does not"


def test_a_halo_one_unit_short_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(referee, "halo_rule", short_halo)
    outcome = judge(Small(), "frozen")
    assert outcome.words == "overlap differs: gradients, logits"
