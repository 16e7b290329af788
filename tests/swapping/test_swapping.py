"""Swapping never changes a bit of outputs and gradients, whatever saves and whoever computes."""

import copy
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pairwise import pairs
from test_pipeline import MODES, balance_of, images, made, options, piped, plain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.swap.statistics import SwapStatistics
from tilenet.parallel.swap.swapping import swapping

CPU = torch.device("cpu")
LIMITS = {"all": 0, "some": 200_000, "none": None}  # of about 2 MB
NETWORKS = {
    "plain": {"norm": "none", "dropout": 0.3},
    "instance": {"norm": "instance", "norm_scope": "tile", "dropout": 0.2},
    "group": {"norm": "group", "norm_scope": "tile", "groups": 2},
    "batch": {"norm": "batch", "norm_scope": "tile"},
    "bilinear": {"upsampling": "bilinear", "dropout": 0.2},
    "transposed": {"upsampling": "transposed", "bias": True},
}
Results = list[Tensor]


def check_empty(statistics: SwapStatistics) -> None:
    assert statistics.active_bytes == statistics.host_bytes == 0


def check_same(found: Results, wanted: Results) -> None:
    assert [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * len(wanted)
    assert any(one.abs().max() > 0 for one in wanted)


def trained(
    module: nn.Module, x: Tensor, forward: Callable[[Tensor], Tensor] | None = None
) -> Results:
    """Output and gradients of the input and the parameters."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = (forward or module)(x)
    (torch.linspace(-1, 2, y.numel()).view_as(y) * y.float().square()).sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize(("name", "limit", "min_bytes"), pairs(NETWORKS, LIMITS, [0, 10_000]))
def test_our_networks(tmp_path: Path, name: str, min_bytes: int, limit: str) -> None:
    wished = options(**NETWORKS[name])
    batch = images(3)
    outputs, wanted = plain(made(wished), batch)
    network = made(wished)
    with swapping(
        network, limit_bytes=LIMITS[limit], min_bytes=min_bytes, swap_dir=str(tmp_path)
    ) as statistics:
        found_outputs, found = plain(network, batch)
    check_same([*found_outputs, *found.values()], [*outputs, *wanted.values()])
    assert found.keys() == wanted.keys()
    assert (statistics.out_count > 20) == (limit != "none")
    if limit == "all":
        assert statistics.in_count >= 0.5 * statistics.out_count > 0
    del outputs, found_outputs
    check_empty(statistics)


@pytest.mark.parametrize(
    ("mode", "num_partitions", "limit", "inline", "precision"),
    pairs(MODES, (1, 2, 3), ("all", "some"), (False, True), ("float64", "bfloat16")),
)
def test_pipelines(
    mode: str, num_partitions: int, limit: str, inline: bool, precision: str
) -> None:
    wished = options(dropout=0.3, norm="instance", norm_scope="tile")
    results = []
    dtype = torch.float64 if precision == "float64" else torch.float32
    for swapped in (False, True):
        network = made(wished, dtype)
        balance = balance_of(len(network), num_partitions, num_partitions)
        pipe = Pipe(network, balance, [CPU] * num_partitions, mode, precision, inline=inline)
        watched = pipe.partitions if swapped else []
        with swapping(watched, limit_bytes=LIMITS[limit], min_bytes=0) as statistics:
            outputs, gradients = piped(pipe, images(4, dtype))
        results.append([*outputs, *gradients.values()])
        assert (statistics.out_count > 0) == swapped
        del outputs
    check_same(results[1], results[0])


class Views(nn.Module):
    """Saves views of all kinds, and the same storage again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.linear(x).chunk(2, dim=-1)
        y = left * right.flip(0) + left.t().mul(right.t()).t()
        y = torch.cat([y[::2] * y[1::2], y[1::2].expand_as(y[::2]) * y[::2]]).unsqueeze(0)
        y = (y.transpose(1, 2) @ y).squeeze(0)
        return y[2:, 3:].as_strided((3, 4), (4, 1), 5) * y[:3, :4].sigmoid()


class Complex(nn.Module):
    """Saves tensors whose conjugation is only noted."""

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        turned = spectrum.conj() * spectrum.roll(1) * (1 + 2j)
        return (turned.imag * turned.real).sin()


class InPlace(nn.Module):
    """Writes over what nobody needs any more, and saves one storage in two versions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(24)

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu_(self.norm(x), 0.1)
        z = y * 2
        z[:3].zero_()
        branch = z.sin()  # saves z as it is now, for a backward that never comes
        z.add_(1).sigmoid_()
        return z * z.exp() + 0 * branch.detach()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.first, x, use_reentrant=False)
        return checkpoint(self.second, y, use_reentrant=True) * y


@pytest.mark.parametrize("kind", [Views, Complex, InPlace, Checkpointed])
@pytest.mark.parametrize("limit", [0, 1000, None])
def test_modules_that_save_in_odd_ways(kind: type[nn.Module], limit: int | None) -> None:
    torch.manual_seed(3)
    module, x = kind(), torch.randn(8, 24)
    wanted = trained(copy.deepcopy(module), x)
    with swapping(module, limit_bytes=limit, min_bytes=0) as statistics:
        found = trained(module, x)
    check_same(found, wanted)
    assert (statistics.out_count > 0) == (limit is not None)
    check_empty(statistics)


def test_a_checkpoint_around_the_module_goes_on_recomputing() -> None:
    torch.manual_seed(3)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(4)))
    calls = []
    module[2].register_forward_hook(lambda *call: calls.append(1))
    x = torch.randn(50, 24)

    def forward(x: Tensor) -> Tensor:
        return checkpoint(module, x, use_reentrant=False)

    wanted = trained(module, x)
    with swapping([module, *module], min_bytes=0) as statistics:
        found = trained(module, x, forward)
    check_same(found, wanted)
    assert len(calls) == 3
    assert statistics.out_count == 0


def test_one_swapper_serves_many_threads() -> None:
    torch.manual_seed(3)
    modules = [nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(5)))]
    modules += [copy.deepcopy(modules[0]) for _ in range(3)]
    inputs = [[torch.randn(33, 64) for _ in range(20)] for _ in range(4)]
    wanted = [[trained(modules[i], x) for x in inputs[i]] for i in range(4)]
    found: list[list[Results]] = [[] for _ in range(4)]
    together = threading.Barrier(4)

    def train(number: int) -> None:
        for x in inputs[number]:
            together.wait()
            found[number].append(trained(modules[number], x))

    with (
        swapping(modules, limit_bytes=20_000, min_bytes=0, lookahead=3) as statistics,
        ThreadPoolExecutor(4) as pool,
    ):
        list(pool.map(train, range(4)))
    for ours, theirs in zip(itertools.chain(*found), itertools.chain(*wanted), strict=True):
        check_same(ours, theirs)
    assert statistics.out_count > 200
    assert statistics.in_count > 100
    check_empty(statistics)


def test_gradients_of_gradients_and_graphs_that_are_kept() -> None:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24), nn.Sigmoid())
    results = []
    for swapped in (False, True):
        x = torch.linspace(-1, 1, 240).view(10, 24).requires_grad_()
        with swapping(module if swapped else [], min_bytes=0) as statistics:
            y = module(x).square().sum()
            (first,) = torch.autograd.grad(y, x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
            (again,) = torch.autograd.grad(y, x)
        results.append([first.detach(), second, again])
        del y, first
    check_same(results[1], results[0])
    check_empty(statistics)


def test_backward_may_run_when_the_context_has_ended() -> None:
    torch.manual_seed(3)
    layers = nn.Tanh(), nn.Linear(24, 24), nn.Sigmoid(), nn.Tanh()
    module, x = nn.Sequential(nn.Linear(24, 24), *layers), torch.randn(8, 24)
    wanted = trained(module, x)
    module.zero_grad()
    x.requires_grad_()
    with swapping(module, min_bytes=0) as statistics:
        y = module(x)
    assert statistics.host_bytes > 0
    (torch.linspace(-1, 2, y.numel()).view_as(y) * y.square()).sum().backward()
    check_same([y.detach(), x.grad, *(p.grad for p in module.parameters())], wanted)
    check_empty(statistics)
    assert statistics.in_count > 0
    count = statistics.out_count
    trained(module, x)
    assert statistics.out_count == count


def test_a_copy_of_a_module_is_swapped_with_it() -> None:
    module, x = nn.Sequential(nn.Linear(24, 24), nn.Tanh()), torch.randn(8, 24)
    with swapping(module, min_bytes=0) as statistics:
        check_same(trained(copy.deepcopy(module), x), trained(module, x))
        assert statistics.out_count == 4  # of each the input and the result
