"""What is measured of layer groups is what happens when they keep, swap or are computed again."""

import copy
import gc
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from test_cell_actions import in_cells, interrupted
from test_cells_of_users import stacked
from test_pipeline import images, made, options
from test_swapping import check_empty
from torch import Tensor, nn

from bench.swapping import measure
from bench.swapping.measure import measure_groups
from tilenet.errors import TilenetError
from tilenet.parallel.swap.actions import Action, acting
from tilenet.parallel.swap.host_pool import FileSlabs
from tilenet.parallel.swap.swapper import Swapper
from tilenet.planning.memory.live import LiveBytes
from tilenet.planning.swap.groups import LayerGroup

NAMES = ["residual", "attention", "channels last", "spectral", "layers"]


def model_of(kind: str) -> tuple[nn.Module, list[nn.Module], Tensor]:
    if kind != "layers":
        return stacked(kind)
    network = in_cells(made(options(dropout=0.2, norm="instance", norm_scope="tile")), 3)
    network.mask_key.images = (4,)
    return network, list(network), images(1)[0]


def measured(
    folder: Path, kind: str, min_bytes: int = 0, limit: int = 0
) -> tuple[tuple[LayerGroup, ...], nn.Module, list[nn.Module], Tensor]:
    model, groups, x = model_of(kind)
    swapper = Swapper(limit, min_bytes, 2, FileSlabs(str(folder)))
    found = measure_groups(groups, lambda: model(x).square().sum().backward(), swapper)
    check_empty(swapper.statistics)
    model.zero_grad()
    return found, model, groups, x


@pytest.mark.parametrize("kind", NAMES)
def test_bytes_are_those_of_a_step_that_keeps_all(tmp_path: Path, kind: str) -> None:
    found, model, groups, x = measured(tmp_path, kind)
    again = measured(tmp_path, kind, limit=1 << 40)[0]  # swapped or not
    names = [name for name in vars(found[0]) if not name.endswith("_s")]
    for one, other in zip(found, again, strict=True):
        assert [getattr(one, n) for n in names] == [getattr(other, n) for n in names]
    peaks: list[int] = []
    live = LiveBytes()

    def enter(*_: object) -> None:
        live.peak = live.current

    for group in groups:
        group.register_forward_pre_hook(enter)
        group.register_forward_hook(lambda *_: peaks.append(live.peak))
    with live:
        live.charge([x])
        y = model(x)
        loss, last = y.square().sum(), y.nbytes
        del y
        live.peak = live.current
        loss.backward()
    saved = [one.saved_bytes for one in found]
    small = 2000 if kind in ("spectral", "attention") else 600  # what lives between groups
    for number, one in enumerate(found):
        assert abs(peaks[number] - sum(saved[:number]) - one.forward_bytes) <= small, number
    bounds = [sum(saved[:n]) + one.backward_bytes for n, one in enumerate(found)]
    others = last + sum(p.nbytes for p in model.parameters())  # what the loss saves, and gradients
    assert live.peak - others <= max(bounds) <= live.peak + max(saved) + small


def out_bytes_of(
    folder: Path,
    groups: list[nn.Module],
    action: Action,
    min_bytes: int,
    x: Tensor,
    model: nn.Module,
) -> list[int]:
    """What went out while each group computed."""
    swapper = Swapper(0, min_bytes, 0, FileSlabs(str(folder)))
    went = [0]
    with ExitStack() as stack:
        for group in groups:
            hook = group.register_forward_hook
            stack.enter_context(hook(lambda *_: went.append(swapper.statistics.out_bytes)))
        stack.enter_context(acting(groups, [action] * len(groups), swapper))
        model(x)
    return [after - before for before, after in pairwise(went)]


@pytest.mark.parametrize("min_bytes", [100, 1200])  # buffers of norms go, too, if they are larger
@pytest.mark.parametrize("kind", NAMES)
def test_saved_and_swapped_bytes_are_the_swappers(
    tmp_path: Path, kind: str, min_bytes: int
) -> None:
    whole, *_ = measured(tmp_path, kind)
    found, model, groups, x = measured(tmp_path, kind, min_bytes)
    each = out_bytes_of(tmp_path, groups, "swap", min_bytes, x, model)
    assert [one.swapped_bytes for one in found] == each
    assert sum(each) > 0 or (kind, min_bytes) == ("spectral", 1200)
    assert [a.saved_bytes for a in found] == [b.saved_bytes for b in whole]
    assert [a.saved_bytes >= a.swapped_bytes for a in found] == [True] * len(groups)


def test_input_bytes_are_what_stays_where_a_group_is_computed_again(tmp_path: Path) -> None:
    found, model, groups, x = measured(tmp_path, "layers")
    each = out_bytes_of(tmp_path, groups, "both", 0, x, model)
    inputs = [one.input_bytes for one in found]
    # Once, a skip that is popped has gone before as the next group's input.
    assert [a == b for a, b in zip(each, inputs, strict=True)].count(False) == 1
    assert sum(each) < sum(inputs)
    given: list[int] = []
    for group in groups:
        group.register_forward_pre_hook(lambda _, args: given.append(args[0].nbytes))
    model(x)
    joins = ["JoinMaps" in str(group) for group in groups]
    assert [a > b for a, b in zip(inputs, given, strict=True)] == joins
    assert [a == b for a, b in zip(inputs, given, strict=True)] == [not one for one in joins]


def test_all_tensors_among_the_arguments_are_inputs(tmp_path: Path) -> None:
    found, model, groups, x = measured(tmp_path, "attention")
    assert found[0].input_bytes == 2 * x.nbytes + 4  # two maps, one in a dict, and a number
    assert out_bytes_of(tmp_path, groups, "both", 0, x, model)[0] == found[0].input_bytes


class Clock:
    """Goes on when it is told to."""

    now = 0

    @classmethod
    def read(cls) -> float:
        return float(cls.now)

    @classmethod
    def go(cls, seconds: int) -> None:
        cls.now += seconds


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        Clock.go(10)
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        Clock.go(30)
        return gradient * 2


class SlowLayers(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers, self.aside = layers, torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        x, self.aside = x + self.aside, torch.ones(1)
        for _ in range(self.layers):
            x = Slow.apply(x).sin()
        return x


class Branches(nn.Module):
    """Two branches of different lengths, work between the groups, and a way past their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList([SlowLayers(1), SlowLayers(3), SlowLayers(2)])
        self.weight = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.groups[0](Slow.apply(x * self.weight))
        y = self.groups[1](x)
        self.groups[2].aside = y.sin()
        return Slow.apply(y) + self.groups[2](x)


def test_times_are_those_of_each_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "perf_counter", Clock.read)
    model, x = Branches(), torch.linspace(-1, 1, 1000)
    swapper = Swapper(0, 0, 2, FileSlabs(str(tmp_path)))
    pack, unpack = swapper.pack, swapper.unpack
    swapper.pack = lambda tensor: Clock.go(1) or pack(tensor)  # copies do not count
    swapper.unpack = lambda held: Clock.go(1) or unpack(held)
    found = measure_groups(list(model.groups), lambda: model(x).sum().backward(), swapper)
    assert [one.forward_s for one in found] == [10, 30, 20]
    # The slow layers before the groups and behind them are nobody's.
    assert [one.backward_s for one in found] == [30, 90, 60]


def test_groups_that_write_over_their_input_may_not_be_computed_again(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(30, 30), nn.ReLU(inplace=True), nn.Linear(30, 30))
    x = torch.linspace(-1, 1, 120).view(4, 30)
    swapper = Swapper(0, 0, 2, FileSlabs(str(tmp_path)))
    found = measure_groups(list(model), lambda: model(x).sum().backward(), swapper)
    assert [one.may_checkpoint for one in found] == [True, False, True]


def test_bytes_in_backward(tmp_path: Path) -> None:
    """Of chains whose needs are known; a map has 12 800 bytes, a matrix 4096."""
    torch.manual_seed(3)
    size, matrix = 100 * 32 * 4, 32 * 32 * 4
    groups = [nn.Linear(32, 32, bias=False) for _ in range(9)]
    model = nn.Sequential(*groups, nn.SiLU())
    x = torch.randn(100, 32, requires_grad=True)
    swapper = Swapper(0, 0, 2, FileSlabs(str(tmp_path)))
    found = measure_groups(list(model), lambda: model(x).sin().sum().backward(), swapper)
    # The gradients of output and input, and of one matrix, not of those before.
    for one in found[:-1]:
        assert one.saved_bytes == size
        assert 3 * size <= one.backward_bytes <= 3 * size + 2 * matrix
    assert found[-1].saved_bytes == size
    assert found[-1].backward_bytes == 3 * size


def test_a_large_group_does_not_count_for_those_before_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sigmoid(), nn.Upsample(scale_factor=8), nn.Tanh())
    x = torch.linspace(-1, 1, 1800).view(1, 2, 30, 30).requires_grad_()
    swapper = Swapper(0, 0, 2, FileSlabs(str(tmp_path)))
    found = measure_groups(list(model), lambda: model(x).sum().backward(), swapper)
    sizes = [x.nbytes * factor for factor in (1, 0, 64)]
    assert [one.saved_bytes for one in found] == sizes
    assert [one.forward_bytes for one in found] == [2 * x.nbytes, 64 * x.nbytes, 128 * x.nbytes]
    loss = 4  # bytes of its gradient, which autograd holds to the end
    assert found[0].backward_bytes == 3 * x.nbytes + loss
    assert found[1].backward_bytes == 65 * x.nbytes + loss
    assert found[2].backward_bytes >= 128 * x.nbytes


def test_one_group_at_a_time_is_alive(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 200)) for _ in range(12))
    )
    x = torch.randn(300, 200)
    peaks = []
    for limit in (0, None):
        swapper = Swapper(limit, 0, 0, FileSlabs(str(tmp_path)))
        with LiveBytes() as live:
            measure_groups(list(model), lambda: model(x).sum().backward(), swapper)
        peaks.append(live.peak - sum(2 * p.nbytes for p in model.parameters()))
    assert peaks[0] < 0.45 * peaks[1]


def test_nothing_stays_behind(tmp_path: Path) -> None:
    model, groups, x = stacked("residual")
    swapper = Swapper(0, 0, 2, FileSlabs(str(tmp_path)))

    def clean() -> bool:
        gc.collect()
        modules = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
        grads = [p for p in model.parameters() if p._post_accumulate_grad_hooks]
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return not modules and not grads and hooks is None

    other = copy.deepcopy(model)
    measure_groups(groups, lambda: model(x).sum().backward(), swapper)
    assert clean()
    for _ in range(2):
        other(x).sum().backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    handle = groups[1].second.register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_groups(groups, lambda: model(x).sum().backward(), swapper)
    handle.remove()
    assert clean()
    check_empty(swapper.statistics)
    with pytest.raises(TilenetError, match=r"never called: a Linear"):
        measure_groups([*groups, nn.Linear(2, 2)], lambda: model(x).sum().backward(), swapper)
    assert clean()
