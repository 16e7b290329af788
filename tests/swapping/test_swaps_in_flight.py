"""Copies that end late, as a device's do, are waited for. Streams and events are stand-ins.

What torch's own streams and events do is only tried where there is a GPU.
"""

import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_swapper import MAP, convolutions, hooks
from test_swapping import check_empty, check_same, trained
from torch import Tensor

from tilenet.errors import TilenetError
from tilenet.parallel.swap.copies import HostCopies
from tilenet.parallel.swap.host_pool import FileSlabs
from tilenet.parallel.swap.statistics import SwapStatistics
from tilenet.parallel.swap.swapper import Swapper


class LateEvent:
    """The end of a copy that is made when it is waited for, or now and then when it is asked."""

    def __init__(self, copy: Callable[[], None], chance: random.Random) -> None:
        self._copy, self._chance, self._done = copy, chance, False
        self.memory: torch.UntypedStorage | None = None

    def query(self) -> bool:
        if self._chance.random() < 0.3:
            self.synchronize()
        return self._done

    def synchronize(self) -> None:
        if not self._done:
            self._done = True
            self._copy()
            self.memory = None


class LateArrival:
    def __init__(self, event: LateEvent, flat: Tensor, lazy: bool) -> None:
        self.event, self._lazy = event, lazy
        self._flat = weakref.ref(flat.untyped_storage())

    def before_use(self, tensor: Tensor) -> None:
        if not self._lazy:
            self.event.synchronize()

    def before_drop(self) -> None:
        if not self.event._done:
            self.event.memory = self._flat()  # nobody else gets it before the end


class LateStreams:
    """Stands in for several devices' streams; holds none of the memory that it copies from and to.

    Args:
        chance: When copies end.
        lazy: Who uses a tensor waits for it by itself, as what is queued on a device does.
    """

    def __init__(self, chance: random.Random, lazy: bool = False) -> None:
        self._chance, self._lazy = chance, lazy
        self.sent: list[LateEvent] = []
        self.fetched: list[LateEvent] = []
        self.lost = 0

    def _later(self, target: Tensor, source: Tensor, device_side: Tensor) -> LateEvent:
        alive = weakref.ref(device_side.untyped_storage())
        host_side = source if device_side is target else target
        size, sends = len(host_side), device_side is source
        del device_side, target, source

        def copy() -> None:
            storage = alive()
            if storage is None:
                self.lost += 1
                return
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)[:size]
            (host_side.copy_(flat) if sends else flat.copy_(host_side))

        for event in self._chance.sample(self.sent[-8:], len(self.sent[-8:])):
            event.query()  # time goes by
        return LateEvent(copy, self._chance)

    def send(self, flat: Tensor, host: Tensor) -> LateEvent:
        self.sent.append(self._later(host, flat, flat))
        return self.sent[-1]

    def fetch(
        self, host: Tensor, device: torch.device, sent: LateEvent | None
    ) -> tuple[Tensor, LateArrival]:
        if sent is not None:
            sent.synchronize()
        flat = torch.full(host.shape, 0xAB, dtype=torch.uint8)
        self.fetched.append(self._later(flat, host, flat))
        return flat, LateArrival(self.fetched[-1], flat, self._lazy)


def late_swapper(
    folder: Path, limit: int, lookahead: int, seed: int, lazy: bool = False
) -> tuple[Any, LateStreams]:
    swapper = Swapper(limit, 0, lookahead, FileSlabs(str(folder), slab_bytes=3 * MAP))
    streams = LateStreams(random.Random(seed), lazy)
    swapper.copies._streams = streams  # type: ignore[assignment]
    return swapper, streams


def under_way(copies: HostCopies) -> list[Any]:
    return [copy for leaving in copies._leaving.values() for copy in leaving._copies]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("limit", "lookahead"), [(0, 0), (MAP, 2), (3 * MAP, 2), (6 * MAP, 5)])
def test_nobody_reads_before_the_end_or_writes_meanwhile(
    tmp_path: Path, limit: int, lookahead: int, seed: int
) -> None:
    module, x = convolutions()
    wanted = trained(module, x)
    swapper, streams = late_swapper(tmp_path, limit, lookahead, seed)

    def forward(x: Tensor) -> Tensor:
        with hooks(swapper):
            y = module(x)
        assert len(under_way(swapper.copies)) <= 4
        return y

    for _ in range(3):
        check_same(trained(module, x, forward), wanted)
        check_empty(swapper.statistics)
    assert len(streams.sent) == swapper.statistics.out_count > 10
    assert swapper.statistics.in_count > 5
    assert streams.lost == 0
    swapper.close()
    assert swapper.copies._slabs._file.closed
    assert not under_way(swapper.copies)


@pytest.mark.parametrize("seed", range(8))
def test_a_part_is_not_written_while_a_copy_reads_or_writes_it(tmp_path: Path, seed: int) -> None:
    """Many graphs that are dropped with copies under way, and with work that waits for them."""
    swapper, streams = late_swapper(tmp_path, 0, 2, seed, lazy=True)
    chance = random.Random(seed)
    held: list[tuple[Any, int]] = []
    queued: list[tuple[Tensor, LateEvent | None, int]] = []

    def work(most: int) -> None:
        while len(queued) > most:
            tensor, arrival, value = queued.pop(0)
            if arrival is not None:
                arrival.synchronize()
            assert (tensor == value).all()

    for number in range(600):
        swapper.limit_bytes = chance.choice([0, 0, 8000, 20_000])
        held.append((swapper.pack(torch.full((1000,), float(number))), number))
        if chance.random() < 0.6:
            saved, value = held.pop(chance.randrange(len(held)))
            tensor, arrival = swapper.unpack(saved), saved.storage.arrival
            queued.append((tensor, arrival and arrival.event, value))
            del saved, tensor, arrival
        work(3)
        while len(held) > 6:
            held.pop(chance.randrange(len(held)))
    assert swapper.statistics.in_count > 50
    held.clear()
    work(0)
    swapper.close()
    check_empty(swapper.statistics)
    assert all(event._done for event in streams.sent + streams.fetched)
    assert not under_way(swapper.copies)
    assert streams.lost == 0


class Never(random.Random):
    """Chance that nothing ends by itself."""

    def random(self) -> float:
        return 1.0

    def getrandbits(self, k: int, /) -> int:
        return super().getrandbits(k)


def test_a_pool_is_not_full_while_copies_from_it_are_under_way(tmp_path: Path) -> None:
    copies = HostCopies(FileSlabs(str(tmp_path), 12_288, 4096), SwapStatistics())
    streams = LateStreams(Never(3))
    copies._streams = streams  # type: ignore[assignment]
    wanted = [torch.full((4096,), value, dtype=torch.uint8) for value in range(3, 9)]
    for value in wanted[:-3]:
        copies.release(copies.send(value.clone().untyped_storage()))
    sent = [copies.send(value.clone().untyped_storage()) for value in wanted[-3:]]
    with pytest.raises(TilenetError, match="must fit the host's share"):
        copies.send(wanted[0].untyped_storage())
    assert not all(event._done for event in streams.sent)
    for copy, value in zip(sent, wanted[-3:], strict=True):
        storage, arrival = copies.fetch(copy, torch.device("cpu"))
        assert arrival is not None
        arrival.event.synchronize()  # type: ignore[attr-defined]
        assert torch.equal(torch.empty(0, dtype=torch.uint8).set_(storage), value)
        copies.release(copy)
    assert streams.lost == 0
    copies.close()


@pytest.mark.parametrize("most", [0, 4096, 10_000, 1 << 20])
def test_no_more_bytes_are_under_way_than_the_plan_leaves_to_copies(
    tmp_path: Path, most: int
) -> None:
    cpu, chance = torch.device("cpu"), random.Random(most)
    copies = HostCopies(FileSlabs(str(tmp_path)), SwapStatistics(), {cpu: most})
    streams = LateStreams(Never(3))
    copies._streams = streams  # type: ignore[assignment]
    fullest = 0
    for _ in range(50):
        storages = [torch.zeros(chance.randint(1, 6000), dtype=torch.uint8).untyped_storage()]
        alive = weakref.ref(storages[0])
        copies.send(storages.pop())
        held = [storage for _, storage in under_way(copies)]
        assert (alive() is None) == (not held)
        assert len(held) <= 4
        assert sum(storage.nbytes() for storage in held) <= most
        fullest = max(fullest, len(held))
        held.clear()
    assert (fullest > 0) == (most > 0)
    assert fullest == 4 or most < 4 * 6000
    copies.close()
    assert streams.lost == 0
