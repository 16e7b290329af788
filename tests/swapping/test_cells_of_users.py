"""Cell actions on modules of users: the same bits, random numbers and counts among them."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairwise import pairs
from test_cell_actions import ACTIONS, MIXED, acted, check_swapped
from test_swapping import InPlace, Views, check_empty, check_same, trained
from torch import Tensor, nn
from torchgpipe import is_recomputing

from tilenet.model.modules import BatchNorm


class Residual(nn.Module):
    """torch's own batch norms, and activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None)])
        self.last = nn.InstanceNorm2d(4, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu_(self.norms[0](self.first(x)))
        return F.relu_(self.last(self.norms[1](self.second(y)) + x))


class Attention(nn.Module):
    """Draws random numbers, and is called with keywords and more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.norm, self.drop = nn.LayerNorm(12), nn.Dropout(0.3)

    def forward(self, x: Tensor, more: dict[str, Any], *, scale: Tensor) -> Tensor:
        q, k, v = self.mixed(self.norm(x)).chunk(3, -1)
        y = F.scaled_dot_product_attention(q * scale, k, v, dropout_p=0.2)
        return x + self.drop(self.out(y)) * more["weight"] * more["factor"]


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([Attention(), Attention()])
        self.scale = nn.Parameter(torch.tensor([0.7]))

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            x = cell(x, {"weight": x.sigmoid(), "factor": 2}, scale=self.scale * 3)
        return x


class Spectral(nn.Module):
    """Reads buffers that it changes in each pass, and puts a new one in place of another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(12, 12))
        self.register_buffer("average", torch.full((12,), 0.5))
        self.register_buffer("table", torch.linspace(0, 1, 12))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return (self.linear(x) * self.average + self.table).tanh()


def stacked(kind: str) -> tuple[nn.Module, list[nn.Module], Tensor]:
    """A model, its cells, and an input."""
    torch.manual_seed(11)
    if kind == "attention":
        model: nn.Module = Attentive()
        return model, list(model.cells), torch.randn(3, 7, 12)
    if kind == "channels last":
        model = nn.Sequential(nn.Conv2d(3, 4, 3), Residual(), Residual(), nn.MaxPool2d(2))
        x = torch.randn(2, 3, 22, 26)
        return (
            model.to(memory_format=torch.channels_last),
            list(model),
            x.to(memory_format=torch.channels_last),
        )
    cells = {"residual": Residual, "spectral": Spectral, "views": Views, "in place": InPlace}[kind]
    shape = {"residual": (2, 4, 12, 14), "spectral": (9, 12)}.get(kind, (8, 24))
    count = 1 if kind == "views" else 3
    model = nn.Sequential(*(cells() for _ in range(count)))
    return model, list(model), torch.randn(shape)


MODELS = ["residual", "attention", "spectral", "channels last", "views", "in place"]


@pytest.mark.parametrize(("model_kind", "kind", "autocast"), pairs(MODELS, MIXED, (False, True)))
def test_models_of_users(tmp_path: Path, model_kind: str, kind: str, autocast: bool) -> None:
    model, cells, x = stacked(model_kind)
    other = copy.deepcopy(model)
    results, draws = [], []
    for one, acts in ((other, "keep"), (model, kind)):
        torch.manual_seed(12)
        parts = cells if one is model else []
        with acted(parts, acts, tmp_path) as swapper:
            found = []
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    found += trained(one, x)
        results.append([*found, *(b.clone() for b in one.buffers())])
        draws.append(torch.rand(1))
    check_same(results[1], results[0])
    assert [a.stride() for a in results[1]] == [a.stride() for a in results[0]]
    assert torch.equal(*draws)
    if kind != "mixed" and model_kind != "views":  # whose input the caller holds
        check_swapped(swapper, kind)
    check_empty(swapper.statistics)


class Counts(nn.Module):
    """Counts its calls, and tiles as a run of ours does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = BatchNorm(4), 0
        self.norm.tiles = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += not is_recomputing()
        return self.norm(x).tanh()


@pytest.mark.parametrize("kind", ACTIONS)
def test_modules_that_ask_count_once(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(2)
    model, x = nn.Sequential(Counts(), Counts()), torch.randn(3, 4, 5, 6)
    other = copy.deepcopy(model)
    with acted(model, kind, tmp_path):
        found = [trained(model, x * n) for n in (1, 2, 3)]
    wanted = [trained(other, x * n) for n in (1, 2, 3)]
    check_same([*itertools.chain(*found)], [*itertools.chain(*wanted)])
    assert [cell.calls for cell in model] == [3, 3]
    assert [cell.norm.tiles for cell in model] == [3, 3]
    buffers = zip(model.buffers(), other.buffers(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in buffers)


@pytest.mark.parametrize("kind", ["checkpoint", "both"])
@pytest.mark.parametrize("model_kind", ["residual", "spectral"])
def test_backward_may_run_behind_the_context_and_twice(
    tmp_path: Path, model_kind: str, kind: str
) -> None:
    model, cells, x = stacked(model_kind)
    other = copy.deepcopy(model)
    results = []
    for one, parts in ((other, []), (model, cells)):
        with acted(parts, kind, tmp_path) as swapper:
            x = x.detach().requires_grad_()
            y = one(x)
        y.square().sum().backward(retain_graph=True)
        y.sin().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in one.parameters()), *one.buffers()])
        del y
    check_same(results[1], results[0])
    check_empty(swapper.statistics)


@pytest.mark.parametrize("kind", ["checkpoint", "both"])
def test_a_copy_of_a_model_computes_with_its_own_weights(tmp_path: Path, kind: str) -> None:
    model, cells, x = stacked("residual")
    calls: list[int] = []
    with acted(cells, kind, tmp_path):
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.mul_(1.5)
        other = copy.deepcopy(copied)
        copied[0].first.register_forward_hook(lambda *call: calls.append(1))
        found = trained(copied, x)
        assert len(calls) == 2
    trained(copied, x)
    assert len(calls) == 3  # not computed again: the context has ended
    check_same(trained(other, x), found)
    assert not torch.equal(trained(model, x)[0], found[0])
