"""Count the bytes of the partitions through which micro-batches flow, one of them the slowest."""

from collections.abc import Iterator
from typing import Any

import torch
from partition_bytes import Meter
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tilenet.geometry.tiles import Tiling
from tilenet.model.network import Network
from tilenet.model.origin import Origin
from tilenet.parallel.pipeline import flow
from tilenet.parallel.pipeline.flow import MicroBatch
from tilenet.parallel.pipeline.pipe import Pipe

__all__ = ["bytes_in_flow"]


def _worker(meter: Meter) -> Any:
    """A worker of a partition that is counted."""

    class Worker(flow._Worker):
        def run(self, *args: Any) -> None:
            with meter.lives[self.number]:
                super().run(*args)
            with meter.news:
                meter.ended.add(self.number)
                meter.news.notify_all()

        def _receive(self, other: int) -> Any:
            meter.wait_for(self.number, other, self.posts)
            message = super()._receive(other)
            meter.let_others_go_on(self.number)
            return message

        def _send(self, other: int, message: Any) -> None:
            """As to another device: copies, which are there."""
            named = isinstance(message, tuple)
            maps = message[2] if named else message or []
            with _disable_current_modes(), torch.no_grad():
                copies = [None if map_ is None else _copy(map_) for map_ in maps]
            maps.clear()
            meter.lives[other].charge([copy for copy in copies if copy is not None])
            sent = (*message[:2], copies) if named else None if message is None else copies
            del copies, maps, message
            with meter.news:
                super()._send(other, sent)
                if meter.waits.get(other) == self.number:
                    del meter.waits[other]
                meter.news.notify_all()
            del sent
            meter.let_others_go_on(self.number)

    return Worker


def _copy(map_: Tensor) -> Tensor:
    return map_.detach().clone().requires_grad_(map_.requires_grad)


def bytes_in_flow(
    net: Network,
    size: tuple[int, int],
    balance: tuple[int, ...],
    most: int,
    checkpointing: Any,
    slow: int | None = None,
    tiling: Tiling | None = None,
) -> list[int]:
    """Most bytes of each partition in a step, weights and their gradients aside.

    Args:
        slow: The partition that goes on when all others wait; None: none does.
        tiling: Of 3 × 3 ranks that exchange halos, of which the middle one is counted.
    """
    net.eval()  # frozen norms, as they are built
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    meter, classes = Meter(len(balance), slow), 2

    def feed() -> Iterator[MicroBatch]:
        for number in range(2 * most + 1):
            origin = Origin((number,), tiling, (4,), number)
            yield MicroBatch(torch.randn(1, 3, *size), origin, number)

    def measure(number: int, logits: Tensor) -> Tensor:
        labels = torch.randint(0, classes, (1, *size))
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    plain, flow._Worker = flow._Worker, _worker(meter)  # type: ignore[misc]
    try:
        pipe = Pipe(net, balance, [torch.device("cpu")] * len(balance), checkpointing)
        pipe.train_in_flow(feed(), measure, most)
    finally:
        flow._Worker = plain  # type: ignore[misc]
    return [live.peak for live in meter.lives]
