"""Tensors on one storage that count versions apart, as a GRU's gates: each has its own copy."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilenet import TilenetError, swapping


class Chunked(nn.Module):
    """Writes over parts between saves of others, each at its own version 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(40, 60)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = torch.unsafe_chunk(self.linear(x), 3, dim=1)
        total = first.square()
        second.add_(1)
        total = total + second.square()
        third.mul_(2)
        return total + third.square()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "chunks": Chunked,
    "GRU": lambda: nn.GRU(40, 30, 2),
    "GRUCell": lambda: nn.GRUCell(40, 30),
    "LSTMCell": lambda: nn.LSTMCell(40, 30),
    "LSTM, projected": lambda: nn.LSTM(40, 30, proj_size=7, bidirectional=True),
    "RNN": lambda: nn.RNN(40, 30),
}


def gradients(module: nn.Module, x: Tensor, limit: dict[str, Any] | None) -> list[Tensor]:
    module = copy.deepcopy(module)

    def run() -> None:
        output = module(x)
        output = output[0] if isinstance(output, tuple) else output
        output.square().sum().backward()

    if limit is None:
        run()
    else:
        with swapping(module, min_bytes=1, **limit) as swapped:
            run()
        assert swapped.out_count > 0
    return [weight.grad for weight in module.parameters() if weight.grad is not None]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("limit", [{}, {"limit_bytes": 0}, {"limit_bytes": 20_000}])
def test_gradients_are_those_without_swapping(name: str, limit: dict[str, Any]) -> None:
    torch.manual_seed(2)
    module = MODULES[name]()
    x = torch.randn((50, 40) if name in ("chunks", "GRUCell", "LSTMCell") else (9, 50, 40))
    for found, wanted in zip(gradients(module, x, limit), gradients(module, x, None), strict=True):
        assert torch.equal(found, wanted)


def test_forward_mode_gradients_stay_where_they_are() -> None:
    linear, x = nn.Linear(600, 600), torch.randn(600, 600)
    wanted = torch.func.jvp(linear, (x,), (x,))
    with swapping(linear, min_bytes=1):
        found = torch.func.jvp(linear, (x,), (x,))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("models", [nn.ModuleList([nn.Linear(2, 2)]), [nn.ModuleDict()]])
def test_what_is_never_called_is_refused(models: Any) -> None:
    with pytest.raises(TilenetError, match="has no forward"), swapping(models):
        pass
