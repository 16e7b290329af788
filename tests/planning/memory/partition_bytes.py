"""Count the bytes of the partitions of a sweep, one of which is as slow as can be."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tilenet.geometry.halo import context_of
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.layers import Layer
from tilenet.geometry.sweep import Sweeps
from tilenet.geometry.tiles import Cut, cut
from tilenet.geometry.windows import Window
from tilenet.model.loss import Loss
from tilenet.model.network import Network
from tilenet.model.origin import Origin
from tilenet.parallel.exchange import swept_partitions
from tilenet.parallel.exchange.swept_training import SweptPipe
from tilenet.planning.memory.live import LiveBytes

__all__ = ["Meter", "bytes_of_partitions"]

LOSS = Loss(("ce",), 4, 255)


class _Counted(LiveBytes):  # type: ignore[no-untyped-call]
    """For storages that several threads make and let go."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()

    def _add(self, storage: torch.UntypedStorage) -> None:
        with self.lock:
            super()._add(storage)

    def _remove(self, size: int) -> None:
        with self.lock:
            super()._remove(size)


class Meter:
    """Bytes of each partition, and who waits for whom."""

    def __init__(self, partitions: int, slow: int | None) -> None:
        self.lives = [_Counted() for _ in range(partitions)]
        self.slow, self.news = slow, threading.Condition()
        self.waits = dict[int, int]()  # for the message of which partition
        self.ended = set[int]()

    def worker(self) -> Any:
        """A worker of a partition that is counted."""
        meter = self

        class Worker(swept_partitions._Worker):
            def forward(self, *args: Any) -> None:
                self._counted(super().forward, *args)

            def backward(self, *args: Any) -> None:
                self._counted(super().backward, *args)

            def _counted(self, work: Callable[..., None], *args: Any) -> None:
                meter.ended.discard(self.number)
                with meter.lives[self.number]:
                    work(*args)
                with meter.news:
                    meter.ended.add(self.number)
                    meter.news.notify_all()

            def _pass(self, strip: int, come: Any) -> Any:
                meter.let_others_go_on(self.number)
                return super()._pass(strip, come)

            def _receive(self, other: int) -> Any:
                meter.wait_for(self.number, other, self.posts)
                message = super()._receive(other)
                meter.let_others_go_on(self.number)
                return message

            def _send(self, other: int, message: Any) -> None:
                """As to another device: a copy, which is there."""
                with _disable_current_modes(), torch.no_grad():
                    copies = None if message is None else [_copy(one) for one in message]
                if message is not None:
                    message.clear()
                tensors = [_tensor(one) for one in copies or [] if one is not None]
                meter.lives[other].charge(tensors)
                del tensors
                with meter.news:
                    super()._send(other, copies)
                    if meter.waits.get(other) == self.number:
                        del meter.waits[other]
                    meter.news.notify_all()
                del copies
                meter.let_others_go_on(self.number)

        return Worker

    def wait_for(self, number: int, other: int, posts: Any) -> None:
        """Wait until another partition has sent a message to this one."""
        with self.news:
            while posts[other, number].empty():
                self.waits[number] = other
                self.news.notify_all()
                self.news.wait(1)
            self.waits.pop(number, None)

    def let_others_go_on(self, number: int) -> None:
        """Wait until all others wait, where this partition is the slow one."""
        others = set(range(len(self.lives))) - {number}
        if number == self.slow:
            with self.news:
                while not others <= self.ended | self.waits.keys():
                    self.news.wait(1)


def _copy(one: Any) -> Any:
    if isinstance(one, tuple):
        return (*one[:2], one[2].clone())
    return None if one is None else one.clone()


def _tensor(one: Any) -> Tensor:
    return one[2] if isinstance(one, tuple) else one  # type: ignore[no-any-return]


def bytes_of_partitions(
    layers: tuple[Layer, ...],
    net: Network,
    sweeps: Sweeps,
    labels: Tensor,
    balance: tuple[int, ...],
    slow: int | None = None,
) -> list[int]:
    """Most bytes of each partition in a step, as if each had a device.

    Args:
        labels: (1, H, W), of few bits until they are taken.
        slow: The partition that begins a strip, or goes on with what came or went, when all others
            wait; None: none does.
    """
    size = labels.shape[1], labels.shape[2]
    image = torch.randn(1, 3, *size)
    meter = Meter(len(balance), slow)
    cpus = [torch.device("cpu")] * len(balance)
    pipe = SweptPipe(net, layers, cpus, "float32", lambda rows, cols: sweeps, balance=balance)

    def loss(logits: Tensor, own: Window) -> Tensor:
        rows = slice(own.row, own.row + own.height)
        return LOSS.sums(logits, labels[:, rows])[0]

    plain, swept_partitions._Worker = swept_partitions._Worker, meter.worker()  # type: ignore[misc]
    try:
        rule = HaloRule(0, context_of(layers).alignment_px)
        origin = Origin((0,), cut(*size, Cut(grid=(1, 1)), rule), (0,))
        pipe(image, origin, loss).backward()  # type: ignore[no-untyped-call]
    finally:
        swept_partitions._Worker = plain  # type: ignore[misc]
    # Sums of gradients are made by the thread of the caller.
    return [
        live.peak + sum(one.nbytes for number in own for one in net[number].parameters())
        for own, live in zip(pipe.parts, meter.lives, strict=True)
    ]
