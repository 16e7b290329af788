"""On one rank: torch's kernels, which devices take, and plain operations give the same norm."""

from typing import Any

import pytest
import torch
from test_adjoints import drawn, plain_norm
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tilenet.geometry.layers import Norm
from tilenet.geometry.windows import Window
from tilenet.model.network import build_network
from tilenet.parallel.exchange import norm as norms
from tilenet.parallel.exchange.norm import Cells, WholeImageNorm

FULL = Window(0, 0, 15, 17)


class Counting(TorchDispatchMode):
    """Notes the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def module_of(layer: Norm, cells: Cells, dtype: torch.dtype) -> WholeImageNorm:
    plain = build_network((layer,), 1, dtype)[0]
    with torch.no_grad():
        for number, parameter in enumerate(plain.parameters()):
            parameter.copy_(drawn(6, seed=5 + number) + 1)
    return WholeImageNorm(plain, layer, lambda: cells, None)


@pytest.fixture(params=["kernels", "plain"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    pays = request.param == "kernels"
    monkeypatch.setattr(norms, "kernels_pay", lambda device: pays)
    return pays


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("norm", ["instance", "group", "batch"])
@pytest.mark.parametrize(
    ("level", "dtype", "most"),
    [(40, torch.float64, 1e-12), (65_000_000, torch.float32, 2e-6), (0, torch.float32, 2e-6)],
)
def test_it_is_the_formula(
    kernels: bool, norm: Any, affine: bool, level: int, dtype: torch.dtype, most: float
) -> None:
    layer = Norm(6, 6, norm=norm, groups=2 if norm == "group" else 1, affine=affine)
    cells = Cells((FULL,) * 3, (0, 1, 2))
    module = module_of(layer, cells, dtype)
    x = (level + 40 * (drawn(3, 6, 15, 17, seed=2) * 3).round()).to(dtype)
    exact = x.double().requires_grad_()
    weight, bias = (
        (one.detach().double().requires_grad_() for one in module.parameters())
        if affine
        else (torch.ones(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64))
    )
    wanted = plain_norm(exact, layer, weight, bias)
    y = drawn(*x.shape, seed=3)
    wanted.backward(y)

    x.requires_grad_()
    with Counting() as counting:
        found = module(x)
        found.backward(y.to(dtype))
    assert ("native_batch_norm" in counting.names) == (kernels and norm != "group")
    pairs = [(found, wanted), (x.grad, exact.grad)]
    if affine:
        pairs += [(module.weight.grad, weight.grad), (module.bias.grad, bias.grad)]  # type: ignore[union-attr]
    for one, other in pairs:
        gap = (one.detach().double() - other.detach()).abs().max()  # type: ignore[union-attr]
        assert gap <= most * other.detach().abs().max()  # type: ignore[union-attr]


@pytest.mark.parametrize("norm", ["instance", "batch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_numbers_are_normalised_as_torch_does(
    monkeypatch: pytest.MonkeyPatch, norm: Any, dtype: torch.dtype
) -> None:
    """Statistics are taken in float32, and the map and its gradient are rounded once."""
    monkeypatch.setattr(norms, "kernels_pay", lambda device: True)
    layer, x = Norm(6, 6, norm=norm, affine=True), 9 + 4 * drawn(3, 6, 15, 17, seed=2)
    module = module_of(layer, Cells((FULL,) * 3, (0, 1, 2)), torch.float32)
    x, y = x.to(dtype).requires_grad_(), drawn(3, 6, 15, 17, seed=3).to(dtype)
    with Counting() as counting:
        found = module(x)
        found.mul_(2).backward(y / 2)  # layers after it may write over it
    assert "mean" not in counting.names, "the maps stay narrow"
    exact = x.detach().double().requires_grad_()
    weight, bias = (one.detach().double().requires_grad_() for one in module.parameters())
    wanted = plain_norm(exact, layer, weight, bias)
    wanted.backward(y.double())
    for one, other in (
        (found / 2, wanted),
        (x.grad, exact.grad),
        (module.weight.grad, weight.grad),
        (module.bias.grad, bias.grad),
    ):
        assert one is not None
        assert other is not None
        gap = (one.detach().double() - other.detach()).abs().max()
        assert gap <= 2 * torch.finfo(dtype).eps * other.detach().abs().max()


def test_running_statistics_are_torchs(kernels: bool) -> None:
    layer = Norm(6, 6, norm="batch", affine=True)
    module = module_of(layer, Cells((FULL,) * 2, (0, 1)), torch.float64)
    torchs = nn.BatchNorm2d(6, dtype=torch.float64)
    for seed in range(3):
        x = drawn(2, 6, 15, 17, seed=seed) * 4 + 9
        module(x), torchs(x)
    for name in ("running_mean", "running_var"):
        assert (getattr(module, name) - getattr(torchs, name)).abs().max() <= 1e-12


@pytest.mark.parametrize(
    "cells",
    [
        Cells((FULL,) * 3, (0, 1, 0)),
        Cells((FULL, FULL, Window(1, 2, 9, 15)), (0, 1, 2)),
    ],
    ids=["an image of two tiles", "with a halo"],
)
def test_kernels_are_for_whole_maps_alone(monkeypatch: pytest.MonkeyPatch, cells: Cells) -> None:
    monkeypatch.setattr(norms, "kernels_pay", lambda device: True)
    module = module_of(Norm(6, 6, norm="instance"), cells, torch.float64)
    with Counting() as counting:
        module(drawn(3, 6, 15, 17, seed=2))
    assert "native_batch_norm" not in counting.names


@pytest.mark.parametrize(("pays", "most"), [(True, 20), (False, 85)])
def test_a_norm_is_few_operations(monkeypatch: pytest.MonkeyPatch, pays: bool, most: int) -> None:
    """Each costs a device 5 µs; 115 once."""
    monkeypatch.setattr(norms, "kernels_pay", lambda device: pays)
    module = module_of(Norm(6, 6, norm="instance"), Cells((FULL,), (0,)), torch.float32)
    x = drawn(1, 6, 15, 17, seed=2).float().requires_grad_()
    with Counting() as counting:
        module(x).backward(torch.ones_like(x))
    assert len(counting.names) <= most, counting.names
