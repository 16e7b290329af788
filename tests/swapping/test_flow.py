"""Micro-batches that flow through partitions (1F1B): their number and order change no result."""

import gc
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from grammar import generate
from pairwise import pairs
from test_pipeline import (
    CPU,
    KINDS,
    balance_of,
    check,
    check_cuts,
    images,
    made,
    options,
    plain,
    term,
)
from torch import Tensor

from tilenet.adoption.adopt import adopt
from tilenet.errors import TilenetError
from tilenet.model.network import Network
from tilenet.model.origin import Origin
from tilenet.parallel.pipeline import flow
from tilenet.parallel.pipeline.flow import MicroBatch
from tilenet.parallel.pipeline.pipe import Pipe

MODES = "never", "always"


def feed(batch: Sequence[Tensor]) -> Iterator[MicroBatch]:
    for number, image in enumerate(batch):
        yield MicroBatch(image, Origin((number + 10,)), number)


def flowed(pipe: Pipe, batch: Sequence[Tensor], most: int) -> dict[str, Tensor]:
    pipe.train_in_flow(feed(batch), term, most)
    named = pipe.network.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None}


@pytest.mark.parametrize(
    ("partitions", "micro_batches", "most", "mode"),
    pairs((2, 3, 4, 6), (1, 2, 3, 8), (1, 2, 4, 8), MODES),
)
def test_gradients_are_the_plain_networks(
    partitions: int, micro_batches: int, most: int, mode: Any
) -> None:
    wished, batch = options(dropout=0.3), images(micro_batches)
    _, wanted = plain(made(wished), batch)
    network = made(wished)
    balance = balance_of(len(network), partitions, partitions * 10 + micro_batches)
    check(flowed(Pipe(network, balance, [CPU] * partitions, mode), batch, most), wanted)


@pytest.mark.parametrize(("mode", "more", "seed"), pairs(MODES, KINDS, range(3)))
def test_every_kind_of_layer_may_be_at_a_cut(mode: Any, more: dict[str, Any], seed: int) -> None:
    check_cuts(lambda pipe, batch: flowed(pipe, batch, 4), mode, more, seed)


@pytest.mark.parametrize("seed", range(24))
def test_generated_networks(seed: int) -> None:
    try:
        adopted = adopt(generate(seed), 3)
    except TilenetError:
        pytest.skip("it is refused")
    if len(adopted.layers) < 4:
        pytest.skip("it is too short")
    networks = [adopted.network(torch.float64).train() for _ in range(2)]
    unit = adopted.context.alignment_px
    sides = [(-(-40 // unit) * unit, (1 + number) * unit) for number in range(5)]
    try:
        batch = [torch.randn(1, 3, *size, dtype=torch.float64) for size in sides]
        _, wanted = plain(networks[0], batch)
    except (RuntimeError, TilenetError) as error:
        pytest.skip(f"its images must be larger: {error}")
    count = 2 + seed % 3
    pipe = Pipe(
        networks[1], balance_of(len(adopted.layers), count, seed), [CPU] * count, MODES[seed % 2]
    )
    check(flowed(pipe, batch, 1 + seed % 4), wanted)


@pytest.mark.parametrize("frozen", [range(8), range(8, 16), [0, 3, 5]], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_frozen_weights_get_no_gradient(frozen: Sequence[int], mode: Any) -> None:
    def freeze(network: Network) -> Network:
        for number in frozen:
            network[number].requires_grad_(False)
        return network

    _, wanted = plain(freeze(made(options())), images(4))
    network = freeze(made(options()))
    pipe = Pipe(network, (6, 6, len(network) - 12), [CPU] * 3, mode)
    check(flowed(pipe, images(4), 3), wanted)


@pytest.mark.parametrize("slow", range(4))
@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_a_partition_holds_what_those_after_it_have(
    slow: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As few as it may, and as many as needed, whichever partition is the slowest."""
    under_way, peaks = Counter[int](), defaultdict[int, int](int)
    forward, backward = flow._Worker._forward, flow._Worker._backward

    def forward_counted(self: Any, begun: Any) -> None:
        under_way[self.number] += 1
        peaks[self.number] = max(peaks[self.number], under_way[self.number])
        time.sleep(0.01 * (self.number == slow))
        forward(self, begun)

    def backward_counted(self: Any, begun: Any) -> None:
        backward(self, begun)
        under_way[self.number] -= 1

    monkeypatch.setattr(flow._Worker, "_forward", forward_counted)
    monkeypatch.setattr(flow._Worker, "_backward", backward_counted)
    network = made(options())
    flowed(Pipe(network, (4, 4, 4, len(network) - 12), [CPU] * 4), images(8), most)
    assert [peaks[number] for number in range(4)] == [min(most, 4 - number) for number in range(4)]


@pytest.mark.parametrize("place", ["forward", "backward", "measure", "feed"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_error_ends_all(place: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller hears of it, nothing waits, and the next step goes well."""
    network = made(options())
    pipe = Pipe(network, (5, 5, len(network) - 10), [CPU] * 3)

    def failing(name: str) -> Any:
        real = getattr(flow._Worker, name)

        def fails(self: Any, begun: Any) -> None:
            if self.number == at and begun.number == 2:
                raise ValueError("out of memory")
            real(self, begun)

        return fails

    def failing_feed() -> Iterator[MicroBatch]:
        for number, micro_batch in enumerate(feed(images(6))):
            if place == "feed" and number == 2 + at:
                raise ValueError("out of memory")
            yield micro_batch

    def failing_term(number: int, output: Tensor) -> Tensor:
        if place == "measure" and number == 2 + at:
            raise ValueError("out of memory")
        return term(number, output)

    with monkeypatch.context() as patched:
        if place in ("forward", "backward"):
            patched.setattr(flow._Worker, f"_{place}", failing(f"_{place}"))
        with pytest.raises(ValueError, match="out of memory"):
            pipe.train_in_flow(failing_feed(), failing_term, 3)
    network.zero_grad()
    check(flowed(pipe, images(3), 3), plain(made(options()), images(3))[1])


def test_nothing_is_added_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that goes on may have set gradients to zero."""
    network, busy, real, calls = made(options()), threading.Event(), flow.wait, list[Any]()
    backward = flow._Worker._backward

    def slow(self: Any, begun: Any) -> None:
        if self.number == 0:
            busy.set()
            time.sleep(0.2)
        backward(self, begun)

    def interrupted(tasks: Any) -> None:
        calls.append(tasks)
        if len(calls) == 1:
            assert busy.wait(60)
            raise KeyboardInterrupt
        real(tasks)

    monkeypatch.setattr(flow._Worker, "_backward", slow)
    monkeypatch.setattr(flow, "wait", interrupted)
    pipe = Pipe(network, (5, 5, len(network) - 10), [CPU] * 3)
    with pytest.raises(KeyboardInterrupt):
        pipe.train_in_flow(feed(images(6)), term, 3)
    network.zero_grad()
    time.sleep(0.4)
    assert all(parameter.grad is None for parameter in network.parameters())


def test_threads_stay_and_hold_nothing() -> None:
    network, seen = made(options()), set[int]()
    for layer in network:
        layer.register_forward_hook(lambda *_: seen.add(threading.get_ident()))
    before, maps = threading.active_count(), list[Any]()

    def noted(number: int, output: Tensor) -> Tensor:
        maps.append(weakref.ref(output))
        return term(number, output)

    pipe = Pipe(network, balance_of(len(network), 3, 5), [CPU] * 3, "always")
    for _ in range(3):
        pipe.train_in_flow(feed(images(4)), noted, 3)
        assert not any(map_() is not None for map_ in maps)
    assert len(seen) == 3
    del pipe
    gc.collect()
    for _ in range(100):
        if threading.active_count() == before:
            break
        time.sleep(0.05)
    assert threading.active_count() == before


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_partitions_on_gpus(mode: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    devices = [torch.device("cuda", number % torch.cuda.device_count()) for number in range(3)]
    wished = options(dropout=0.3)
    _, wanted = plain(made(wished), images(6))
    network = made(wished)
    found = flowed(Pipe(network, balance_of(len(network), 3, 3), devices, mode), images(6), 3)
    check({name: gradient.cpu() for name, gradient in found.items()}, wanted, 1e-10)
