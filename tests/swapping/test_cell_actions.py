"""Keeping, swapping, computing again and both never change a bit, whatever the cells are."""

import copy
import gc
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pairwise import pairs
from test_pipeline import CPU, MODES, balance_of, images, made, options, piped, plain
from test_swapping import NETWORKS, check_empty, check_same, trained
from torch import Tensor, nn
from torchgpipe.skip.layout import inspect_skip_layout
from torchgpipe.skip.tracker import SkipTracker, current_skip_tracker, use_skip_tracker

from tilenet.errors import TilenetError
from tilenet.model.modules import BatchNorm
from tilenet.model.network import Network
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.swap.actions import Action, acting
from tilenet.parallel.swap.host_pool import FileSlabs
from tilenet.parallel.swap.swapper import Swapper
from tilenet.parallel.swap.swapping import swapping
from tilenet.planning.memory.live import LiveBytes

ACTIONS: tuple[Action, ...] = get_args(Action)
MIXED = (*ACTIONS, "mixed")


@pytest.fixture(autouse=True)
def own_tracker() -> Iterator[None]:
    """Other tests may leave a stashed map in the thread's."""
    with use_skip_tracker(SkipTracker()):
        yield


def in_cells(network: Network, seed: int) -> Network:
    """The network as cells of a few layers each; none begins with an activation in place."""
    chance, cells = random.Random(seed), [[network[0]]]
    for layer in list(network)[1:]:
        if isinstance(layer, nn.LeakyReLU) or chance.random() < 0.6:
            cells[-1].append(layer)
        else:
            cells.append([layer])
    return Network([nn.Sequential(*cell) for cell in cells], network.mask_key).train()


def actions_of(kind: str, count: int) -> list[Action]:
    chance = random.Random(count)
    return [chance.choice(ACTIONS) if kind == "mixed" else kind for _ in range(count)]


@contextmanager
def acted(
    cells: Sequence[nn.Module], kind: str, folder: Path, limit: int | None = 0
) -> Iterator[Swapper]:
    swapper = Swapper(limit, 0, 2, FileSlabs(str(folder)))
    with acting(list(cells), actions_of(kind, len(cells)), swapper):
        yield swapper
    swapper.close()


def check_swapped(swapper: Swapper, kind: str, more_than: int = 0) -> None:
    swaps = kind in ("swap", "both", "mixed")
    assert (swapper.statistics.out_count > more_than) == swaps
    assert (swapper.statistics.in_count > more_than / 4) == swaps


@pytest.mark.parametrize(("name", "kind", "seed"), pairs(NETWORKS, MIXED, range(3)))
def test_our_networks(tmp_path: Path, name: str, kind: str, seed: int) -> None:
    wished = options(**NETWORKS[name])
    batch = images(3)
    reference = made(wished)
    outputs, wanted = plain(reference, batch)
    network = in_cells(made(wished), seed)
    names = list(network.state_dict())
    with acted(network, kind, tmp_path) as swapper:
        assert list(network.state_dict()) == names
        found_outputs, found = plain(network, batch)
    check_same([*found_outputs, *found.values()], [*outputs, *wanted.values()])
    buffers = list(zip(network.buffers(), reference.buffers(), strict=True))
    assert all(torch.equal(ours, theirs) for ours, theirs in buffers)
    assert bool(buffers) == (name == "batch")
    check_swapped(swapper, kind, 10)
    del outputs, found_outputs
    check_empty(swapper.statistics)
    assert not current_skip_tracker().tensors


@pytest.mark.parametrize("kind", ["swap", "checkpoint", "both"])
@pytest.mark.parametrize("split", [0, 19])
def test_skips_within_a_cell(tmp_path: Path, kind: str, split: int) -> None:
    """The whole network as one cell, or as two of which each pops what the other stashed or it."""
    wished = options(dropout=0.3, norm="batch", norm_scope="tile")
    outputs, wanted = plain(made(wished), images(2))
    network = made(wished)
    layers, key = list(network), network.mask_key
    assert not isinstance(layers[split], nn.LeakyReLU)
    parts = [layers[:split], layers[split:]] if split else [layers]
    network = Network([nn.Sequential(*part) for part in parts], key).train()
    with acted(network, kind, tmp_path) as swapper:
        found_outputs, found = plain(network, images(2))
    check_same([*found_outputs, *found.values()], [*outputs, *wanted.values()])
    assert not current_skip_tracker().tensors
    del outputs, found_outputs
    check_empty(swapper.statistics)


def batch_norms(network: nn.Module) -> list[Tensor]:
    return [b for m in network.modules() if isinstance(m, BatchNorm) for b in m.buffers()]


@pytest.mark.parametrize(
    ("mode", "num_partitions", "kind", "inline", "norm"),
    pairs(MODES, (1, 3), ("checkpoint", "both", "mixed"), (False, True), ("instance", "batch")),
)
def test_pipelines(
    tmp_path: Path, mode: str, num_partitions: int, kind: str, inline: bool, norm: str
) -> None:
    wished = options(dropout=0.3, norm=norm, norm_scope="tile")
    results, statistics = [], []
    for wanted_kind in ("keep", kind):
        network = in_cells(made(wished), 3)
        balance = balance_of(len(network), num_partitions, num_partitions)
        pipe = Pipe(network, balance, [CPU] * num_partitions, mode, inline=inline)
        # torchgpipe looks for skips among a partition's children only.
        flat = [nn.Sequential(*(y for x in part for y in x)) for part in pipe.partitions]
        pipe._layout = inspect_skip_layout(flat)
        assert num_partitions == 1 or pipe._layout.by_partition[2]
        with acted(network, wanted_kind, tmp_path) as swapper:
            outputs, gradients = piped(pipe, images(4))
        results.append([*outputs, *gradients.values()])
        statistics.append([b.clone() for b in batch_norms(network)])
        check_swapped(swapper, wanted_kind, 10)
        del outputs
    check_same(results[1], results[0])
    assert all(torch.equal(a, b) for a, b in zip(*statistics, strict=True))
    check_empty(swapper.statistics)


@pytest.mark.parametrize("mode", MODES)
def test_pipelines_under_autocast(tmp_path: Path, mode: str) -> None:
    results = []
    for kind in ("keep", "mixed"):
        network = in_cells(made(options(dropout=0.3), torch.float32), 3)
        pipe = Pipe(network, balance_of(len(network), 1, 4), [CPU], mode, "bfloat16")
        with acted(network, kind, tmp_path):
            outputs, gradients = piped(pipe, images(3, torch.float32))
        results.append([*outputs, *gradients.values()])
    assert results[0][0].dtype == torch.bfloat16
    check_same(results[1], results[0])


def deep(count: int = 8) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(5)
    layers = (
        nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()
        )
        for _ in range(count)
    )
    return nn.Sequential(*layers), torch.randn(1, 8, 64, 64)


def test_memory(tmp_path: Path) -> None:
    """What stays between forward and backward, in maps."""
    model, x = deep()
    size = x.nbytes
    alive: dict[str, int] = {}
    for kind in ACTIONS:
        with acted(model, kind, tmp_path) as swapper, LiveBytes() as live:
            y = model(x)
            alive[kind] = live.current
            y.sum().backward()
        assert swapper.statistics.out_count >= {"swap": 20, "both": 7}.get(kind, 0)
        del y
    # Keeping: 3 maps per cell. Computing again: inputs but the first, which was there before, and
    # the output. Swapping: the output, and the first input, which counts once it has been copied.
    wanted = {"keep": 8 * 3, "checkpoint": 8, "swap": 2, "both": 2}
    assert {kind: round(alive[kind] / size, 2) for kind in ACTIONS} == wanted


CHANGES = {
    "inside": lambda model, x, y: None,
    "the result": lambda model, x, y: y.detach().mul_(2),
    "a parameter": lambda model, x, y: model[0].linear.weight.detach().add_(1),
    "the input": lambda model, x, y: x.detach().add_(1),
}


class Overwrites(nn.Module):
    """Writes over what backward needs, if it is told to."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.linear, self.inside = nn.Linear(12, 12), inside

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).exp()
        z = y.sin() * 2
        if self.inside:
            y.add_(1)
        return (z * y).sigmoid()


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize("change", CHANGES)
def test_writing_over_what_backward_needs_still_raises(
    tmp_path: Path, kind: str, change: str
) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(Overwrites(change == "inside"))
    x = torch.randn(5, 12, requires_grad=True)
    with acted(model, kind, tmp_path) as swapper:
        y = model(x)
        CHANGES[change](model, x, y)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
            y.sum().backward()
    del y
    gc.collect()
    check_empty(swapper.statistics)


@pytest.mark.parametrize("kind", ["checkpoint", "both"])
def test_a_cell_that_writes_over_its_input_is_refused(tmp_path: Path, kind: str) -> None:
    model = nn.Sequential(nn.Linear(12, 12), nn.ReLU(inplace=True), nn.Linear(12, 12))
    x = torch.randn(5, 12)
    with acted([model[1]], kind, tmp_path):
        with pytest.raises(TilenetError, match=r"may not write over its input.*ReLU.*\(5, 12\)"):
            model(x)
        with torch.no_grad():
            y = model(x)
    assert torch.equal(y, model(x))
    wanted = trained(model, x)
    with acted([model[1]], "swap", tmp_path):
        check_same(trained(model, x), wanted)


def interrupted(*call: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ACTIONS)
def test_nothing_stays_behind(tmp_path: Path, kind: str) -> None:
    model, x = deep(2)
    model[1].forward = theirs = model[1].forward  # somebody else's
    attributes = [sorted(cell.__dict__) for cell in model]

    def unchanged() -> bool:
        hooks = [len(c._forward_hooks) + len(c._forward_pre_hooks) for c in model]
        same = [sorted(cell.__dict__) for cell in model] == attributes
        return same and hooks == [0, 0] and model[1].forward is theirs

    with acted(model, kind, tmp_path):
        assert unchanged() == (kind == "keep")
    assert unchanged()
    with pytest.raises(RuntimeError, match="expected input"), acted(model, kind, tmp_path):
        model(x[:, :3])
    assert unchanged()
    model[0][2].register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt), acted(model, kind, tmp_path):
        model(x)
    assert unchanged()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    with pytest.raises(TilenetError, match="one action"):
        acting([model[0], model[0]], ["keep", "swap"], None).__enter__()
    with pytest.raises(TilenetError, match="'drop'"):
        acting([model[0]], ["drop"], None).__enter__()
    assert unchanged()


@pytest.mark.parametrize("limit", [0, 30_000])
def test_swapping_with_actions(tmp_path: Path, limit: int) -> None:
    model, x = deep(4)
    wanted = trained(model, x)
    actions: dict[nn.Module, Action] = {model[0]: "swap", model[1]: "both", model[2]: "checkpoint"}
    with swapping(
        model, limit_bytes=limit, min_bytes=0, swap_dir=str(tmp_path), actions=actions
    ) as statistics:
        check_same(trained(model, x), wanted)
    maps = statistics.out_bytes / x.nbytes
    # Of the first its input and what its 4 layers save, of the second its input.
    assert 4 <= maps <= 6
    with (
        pytest.raises(TilenetError, match=r"of another, the first a Linear"),
        swapping(model, swap_dir=str(tmp_path), actions={nn.Linear(2, 2): "swap"}),
    ):
        pass
    with swapping(model, swap_dir=str(tmp_path), min_bytes=0, actions={}) as statistics:
        check_same(trained(model, x), wanted)
    assert statistics.out_count == 0


def test_cells_within_cells(tmp_path: Path) -> None:
    wanted_model, x = deep(4)
    for outer, inner in itertools.product(ACTIONS, ACTIONS):
        model = copy.deepcopy(wanted_model)
        whole = nn.Sequential(model)
        swapper = Swapper(0, 0, 2, FileSlabs(str(tmp_path)))
        with acting([model, *model], [outer, *[inner] * 4], swapper):
            check_same(trained(whole, x), trained(wanted_model, x))
        check_empty(swapper.statistics)


def test_each_cell_is_computed_as_often_as_its_action_says(tmp_path: Path) -> None:
    network = in_cells(made(options(norm="instance", norm_scope="tile")), 5)
    counts = [0] * len(network)

    def count(number: int) -> Any:
        return lambda *call: counts.__setitem__(number, counts[number] + 1)

    wanted = [1] * len(network)
    for number, (cell, action) in enumerate(
        zip(network, actions_of("mixed", len(network)), strict=True)
    ):
        cell[0].register_forward_hook(count(number))
        # What saves nothing is never needed again.
        saves = any(isinstance(layer, nn.Conv2d | nn.InstanceNorm2d) for layer in cell)
        wanted[number] += action in ("checkpoint", "both") and saves
    hooked: list[int] = []
    network[0].register_forward_hook(lambda *call: hooked.append(1))
    with acted(network, "mixed", tmp_path):
        plain(network, images(1))
    saving = [n for n, cell in enumerate(network) if len(cell) > 1]
    assert [counts[n] for n in saving] == [wanted[n] for n in saving]
    assert {1, 2} <= set(counts)
    assert hooked == [1]
