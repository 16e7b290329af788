"""What is needed in another order than reversed saving goes out and comes back less often."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from test_swapper import hooks, swapper_of
from test_swapping import check_empty, check_same
from torch import Tensor, nn

from tilenet.parallel.swap import saved_order as learned_order
from tilenet.parallel.swap.saved import KeptTensor
from tilenet.parallel.swap.saved_order import LearnedOrder
from tilenet.parallel.swap.swapper import Swapper

MAP = 6 * 24 * 24 * 4


class Forgetful(LearnedOrder):
    """Never learns: numbers are those of saving."""

    def end_step(self) -> None:
        self._begin()


def step(order: LearnedOrder, sizes: list[int], needs: list[int]) -> list[int]:
    """Numbers given in a step that saves some sizes and then needs some of the tensors."""
    order.end_step()
    numbers = [order.number(size) for size in sizes]
    for place in needs + needs[::-1]:  # the first time counts
        order.need(numbers[place])
    return numbers


def soonest_first(numbers: list[int]) -> list[int]:
    return sorted(range(len(numbers)), key=numbers.__getitem__, reverse=True)


@pytest.mark.parametrize("seed", range(20))
def test_numbers_follow_the_needs_of_the_latest_step_of_the_same_sizes(seed: int) -> None:
    chance, order = random.Random(seed), LearnedOrder()
    kinds = {name: [name, *(chance.randrange(3) for _ in range(11))] for name in range(4)}
    needs: dict[int, list[int]] = {}
    all_numbers: list[int] = []
    for _ in range(40):
        name = chance.randrange(4)
        expected = needs.get(name, list(range(12))[::-1])
        needs[name] = expected if chance.random() < 0.7 else chance.sample(range(12), 12)
        numbers = step(order, kinds[name], needs[name])
        assert soonest_first(numbers) == expected
        all_numbers += numbers
    assert len(set(all_numbers)) == len(all_numbers)


def test_the_rest_of_a_step_that_departs_is_in_the_order_of_saving() -> None:
    order = LearnedOrder()
    step(order, [5, 6, 7, 8], [0, 2, 1, 3])
    assert soonest_first(step(order, [5, 6, 7, 8], [0, 2, 1, 3])) == [0, 2, 1, 3]
    for sizes in ([5, 6, 9, 9, 9], [5, 6, 7, 8, 9], [5, 6], [1, 6, 7, 8]):
        numbers = step(order, sizes, [])  # and nothing is learnt from it
        same = [a == b for a, b in zip([*sizes, None], [5, 6, 7, 8, None], strict=False)]
        like = [*same, False].index(False)
        learnt = [place for place in (0, 2, 1, 3) if place < like]
        assert soonest_first(numbers) == [*range(like, len(sizes))][::-1] + learnt
    # Where it departs from one, it may be like another.
    step(order, [5, 6, 9, 9, 9], [2, 3, 4, 0, 1])
    step(order, [5, 6, 7, 8], [0, 2, 1, 3])
    assert soonest_first(step(order, [5, 6, 9, 9, 9], []))[:3] == [2, 3, 4]


def test_what_was_never_needed_is_expected_last() -> None:
    order = LearnedOrder()
    step(order, [3] * 5, [2, 4])
    numbers = step(order, [3] * 5, [1])  # less than before: it tells nothing
    assert soonest_first(numbers)[:2] == [2, 4]
    assert soonest_first(step(order, [3] * 5, [0, 3, 1]))[:2] == [2, 4]
    assert soonest_first(step(order, [3] * 5, []))[:3] == [0, 3, 1]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_order, "MOST_TENSORS", 50)
    order = LearnedOrder()
    numbers = step(order, list(range(200)), list(range(200)))
    assert numbers == sorted(set(numbers))
    assert max(len(order._numbers), len(order._needed), len(order._sizes)) <= 50
    for size in range(30):
        step(order, [size, size + 1], [0, 1])
    assert len(order._steps) <= learned_order.MOST_STEPS
    assert soonest_first(step(order, [29, 30], [])) == [0, 1]
    assert soonest_first(step(order, [2, 3], [])) == [1, 0]


class Pyramid(nn.Module):
    """Parallel branches behind a stem, as DeepLab's, and a skip around them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = self._made(1), nn.Conv2d(30, 6, 3, padding=1)
        self.branches = nn.ModuleList([self._made(rate) for rate in (1, 2, 3, 4)])

    def _made(self, rate: int) -> nn.Module:
        layers = ((nn.Conv2d(6, 6, 3, padding=rate, dilation=rate), nn.Sigmoid()) for _ in range(3))
        return nn.Sequential(*(layer for pair in layers for layer in pair))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.last(torch.cat([*(branch(x) for branch in self.branches), x], 1)).sin()


def model_of() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(8)
    return Pyramid(), torch.randn(3, 6, 24, 24)


Program = Callable[[Callable[[Tensor], Tensor], Tensor], None]


def one_graph(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    model(x[:1] * 1).square().sum().backward()


def two_graphs(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Backward in the order of forward."""
    losses = [model(x[n : n + 1] * 1).square().sum() for n in range(2)]
    for loss in losses:
        loss.backward()


def not_needed(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """What is saved last is never needed."""
    first, second = (model(x[n : n + 1] * 1) for n in range(2))
    (first * second.detach()).sum().backward()
    del second


def kept_twice(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    y = model(x[:1] * 1)
    y.sum().backward(retain_graph=True)
    two_graphs(model, x)
    (y * y.detach()).sum().backward()


PROGRAMS: dict[str, Program] = {
    "one graph": one_graph,
    "two graphs": two_graphs,
    "not needed": not_needed,
    "kept twice": kept_twice,
}


def counted(
    folder: Path, program: Program, learns: bool, limit: int, lookahead: int = 2
) -> tuple[dict[str, int], list[Tensor]]:
    """Of the third step; misses are tensors that had to be fetched when they were needed."""
    model, x = model_of()
    swapper = swapper_of(folder, limit, lookahead, 1000)
    if not learns:
        swapper._learned = Forgetful()
    unpack, missed = swapper.unpack, [0]

    def noted(saved: Any) -> Tensor:
        if not isinstance(saved, KeptTensor):
            missed[0] += saved.storage.here is None and saved.storage.known() is None
        return unpack(saved)

    swapper.unpack = noted  # type: ignore[method-assign]

    def forward(x: Tensor) -> Tensor:
        with hooks(swapper):
            return model(x)

    for _ in range(3):
        model.zero_grad()
        swapper.statistics.reset()
        missed[0] = 0
        program(forward, x)
        check_empty(swapper.statistics)
    s = swapper.statistics
    counts = {"out": s.out_count, "in": s.in_count, "bytes": s.in_bytes, "missed": missed[0]}
    return counts, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("maps", [0, 4, 8, 16, 24, 32])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_more_is_swapped_than_in_the_order_of_saving(
    tmp_path: Path, name: str, maps: int
) -> None:
    model, x = model_of()
    PROGRAMS[name](model, x)
    wanted = [p.grad for p in model.parameters()]
    without, gradients = counted(tmp_path, PROGRAMS[name], False, maps * MAP)
    check_same(gradients, wanted)
    learned, gradients = counted(tmp_path, PROGRAMS[name], True, maps * MAP)
    check_same(gradients, wanted)
    # A tensor that is needed twice has but one place in the order, that of the first time.
    keys = {"out", "in", "bytes"} | ({"missed"} if name != "kept twice" else set())
    assert {key for key in keys if learned[key] > without[key]} == set()
    if name == "one graph":
        assert learned == without  # on one thread autograd reverses saving, branches or not


@pytest.mark.parametrize(("name", "maps"), [("two graphs", 16), ("not needed", 16)])
def test_less_is_swapped_and_more_is_there_when_it_is_needed(
    tmp_path: Path, name: str, maps: int
) -> None:
    without, _ = counted(tmp_path, PROGRAMS[name], False, maps * MAP)
    learned, _ = counted(tmp_path, PROGRAMS[name], True, maps * MAP)
    assert {key for key in learned if learned[key] >= without[key]} == set()
    assert learned["in"] > 0
    assert learned["missed"] == 0 < without["missed"]


@pytest.mark.parametrize(
    ("needs", "goes"), [((0, 1, 3, 2), 2), ((3, 1, 0, 2), 0), ((3, 2, 1, 0), 1), ((2, 3, 0, 1), 1)]
)
def test_a_storage_stays_for_the_first_of_its_needs(
    tmp_path: Path, needs: tuple[int, ...], goes: int
) -> None:
    swapper = swapper_of(tmp_path, 8000)  # room for two of three
    tensors = [torch.linspace(n, n + 1, 1000) for n in range(3)]
    for _ in range(2):
        saved = [swapper.pack(tensors[n]) for n in (0, 1, 0, 2)]
        storages: list[Any] = [saved[place].storage for place in (0, 1, 3)]
        here = [storage.here is not None for storage in storages]
        for place in needs:
            swapper.unpack(saved[place])
        saved.clear()
    assert here.index(False) == goes
    assert here.count(True) == 2


def test_results_do_not_depend_on_the_order(tmp_path: Path) -> None:
    """Programs and sizes that take turns, graphs that are dropped, and wrong expectations."""
    chance = random.Random(4)
    model, x = model_of()
    for kind in (LearnedOrder, Shuffled):
        swapper = swapper_of(tmp_path, 10 * MAP, 2)
        swapper._learned = kind()

        def forward(x: Tensor, swapper: Swapper = swapper) -> Tensor:
            with hooks(swapper):
                return model(x)

        for name in chance.choices(list(PROGRAMS), k=12):
            given = x[..., : chance.choice((16, 24))]
            results = []
            for run in (model, forward):
                model.zero_grad()
                PROGRAMS[name](run, given)
                results.append([p.grad.clone() for p in model.parameters()])
            check_same(results[1], results[0])
            if chance.random() < 0.3:
                forward(given)
            check_empty(swapper.statistics)
        assert swapper.statistics.in_count > 100


class Shuffled(LearnedOrder):
    """Expects what it likes."""

    def number(self, num_bytes: int) -> int:
        return super().number(num_bytes) ^ 0b10110


def test_threads(tmp_path: Path) -> None:
    model, x = model_of()
    wanted = model(x[:1]).square().sum()
    wanted = torch.autograd.grad(wanted, list(model.parameters()))
    swapper = swapper_of(tmp_path, 12 * MAP, 2)
    found: list[tuple[Tensor, ...]] = []
    together = threading.Barrier(3, timeout=60)  # where one thread fails the others end too

    def train() -> None:
        for _ in range(6):
            together.wait()
            with hooks(swapper):
                loss = model(x[:1]).square().sum()
            found.append(torch.autograd.grad(loss, list(model.parameters())))

    with ThreadPoolExecutor(3) as pool:
        for ended in [pool.submit(train) for _ in range(3)]:
            ended.result()
    assert len(found) == 18
    for one in found:
        check_same(list(one), list(wanted))
    check_empty(swapper.statistics)
    assert swapper.statistics.in_count > 100
