"""Train micro-batches that flow through the partitions: one forward, one backward (1F1B).

GPipe computes all micro-batches of a mini-batch forward, takes the loss of all, and goes back: the
pipeline drains after each mini-batch, and a mini-batch is as large as memory allows. Here a
micro-batch goes back as soon as its own loss is known, while those behind it still go forward. So a
partition holds only the micro-batches that the partitions after it have under way, however many a
step has, and waits at the step's ends alone.

Each partition works in a thread of its own. It begins micro-batches until it holds as many as it
may, then ends the oldest before it begins another. Maps go to the partitions that take them as soon
as they are computed, skips too, and their gradients go back. Gradients add up in the order of the
micro-batches, in each partition, whatever its threads do.

Layers may wait for the same layers on other ranks. The order in which a partition takes
micro-batches forward and back follows from their number, from `most` and from the partition's
number, which are the same on all ranks of an image. So these ranks together wait as one rank does,
and end as it does. For this a partition's messages must not meet another's
(`exchange.layers.SpatialContext`), and none may wait in a thread that another needs
(`planning.compatibility.device_obstacle`).

The schedule is PipeDream-Flush's (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN
Training", ICML 2021).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tilenet.model.gpipe import (
    Namespace,
    SkipLayout,
    SkipTracker,
    enable_recomputing,
    use_skip_tracker,
)
from tilenet.model.origin import Origin
from tilenet.model.upload import upload
from tilenet.parallel.pipeline.partition import Partition
from tilenet.parallel.pipeline.posts import PartitionWorker, Posts

Maps = list[Tensor]


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch to train on.

    Attributes:
        image: (B, bands, H, W), on any device.
        origin: Images and tiles of its samples.
        number: Number of the micro-batch, the first argument of the measure.
    """

    image: Tensor
    origin: Origin
    number: int


# The term of the sum that a micro-batch's logits (B, K, H, W) give; differentiable.
Measure = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Flow:
    """The settings that all partitions share.

    Attributes:
        partitions: The partitions in order.
        layout: Senders and receivers of the skips.
        most: Most micro-batches in the pipeline at once.
        recompute: Whether partitions but the last keep inputs alone, and compute again in backward.
    """

    partitions: Sequence[Partition]
    layout: SkipLayout
    most: int
    recompute: bool

    def routes(self, sender: int, receiver: int) -> list[tuple[Namespace, str]]:
        """The skips that go from one partition to another."""
        return [
            (namespace, name)
            for at, namespace, name in self.layout.copy_policy(receiver)
            if at == sender
        ]


def train_in_flow(
    flow: Flow, feed: Iterator[MicroBatch], measure: Measure, threads: Sequence[Executor]
) -> None:
    """Add the gradient of a sum over micro-batches to the parameters' gradients.

    Collective where layers are: all of these ranks take as many micro-batches, and `flow.most`.

    Args:
        feed: The micro-batches; the first partition's thread takes them one by one.
        measure: Called once for each, in order, in the last partition's thread.
        threads: One thread per partition.

    Raises:
        Exception: The first error of any partition, of the feed or the measure.
    """
    posts = Posts(len(flow.partitions))

    def run(number: int) -> None:
        _Worker(number, flow, posts, measure).run(feed)

    tasks = [
        thread.submit(posts.work, part.device, partial(run, number))
        for number, (part, thread) in enumerate(zip(flow.partitions, threads, strict=True))
    ]
    try:
        wait(tasks)
    except BaseException:  # a signal: nothing may be added to gradients after it
        posts.end()
        wait(tasks)
        raise
    try:
        if posts.errors:
            raise posts.errors[0]
    finally:
        posts.errors.clear()  # its traceback would hold it, and all that was computed


class _Skips(SkipTracker):  # type: ignore[misc]
    """A micro-batch's skips in a partition, and the origin of its samples."""

    def __init__(self, origin: Origin) -> None:
        super().__init__()
        self.origin = origin


@dataclass
class _Begun:
    """A micro-batch that went forward through a partition, and waits for its gradients.

    Attributes:
        number: Number of the micro-batch.
        origin: Images and tiles of its samples.
        arrived: Its maps from other partitions, by the sender; kept to compute it again.
        gradients: Gradients of these maps, which backward fills in.
        receivers: Partitions that its maps were sent to, in order.
        returned: Gradients of the maps that were sent, once they are there.
        end: Tensor that backward begins at, with returned gradients; in the last partition logits.
    """

    number: int
    origin: Origin
    arrived: dict[int, Maps]
    gradients: dict[int, list[Tensor | None]] = field(default_factory=dict)
    receivers: list[int] = field(default_factory=list)
    returned: list[Tensor | None] = field(default_factory=list)
    end: Tensor | None = None


class _Worker(PartitionWorker):
    """A partition's work on a step."""

    def __init__(self, number: int, flow: Flow, posts: Posts, measure: Measure) -> None:
        super().__init__(number, posts)
        self.flow, self.measure = flow, measure
        self.part, count = flow.partitions[number], len(flow.partitions)
        self.last = number == count - 1
        self.most = min(flow.most, count - number)
        self.takes = {n: flow.routes(n, number) for n in range(number)}
        self.gives = {n: flow.routes(number, n) for n in range(number + 1, count)}
        self.recompute = flow.recompute and not self.last

    def run(self, feed: Iterator[MicroBatch]) -> None:
        """Take all micro-batches forward and back."""
        waiting, fed = deque[_Begun](), True
        while fed or waiting:
            if fed and len(waiting) < self.most:
                begun = self._begin(feed)
                if begun is None:
                    fed = False
                    if not self.last:
                        self._send(self.number + 1, None)
                else:
                    self._forward(begun)
                    waiting.append(begun)
                    del begun
            else:
                self._backward(waiting.popleft())

    def _begin(self, feed: Iterator[MicroBatch]) -> _Begun | None:
        """The next micro-batch; None: there is none."""
        if self.number == 0:
            fed = next(feed, None)
            if fed is None:
                return None
            return _Begun(fed.number, fed.origin, {-1: [upload(fed.image, self.part.device)]})
        message = self._receive(self.number - 1)
        if message is None:
            return None
        number, origin, maps = message
        before = [n for n in range(self.number - 1) if self.takes[n]]
        return _Begun(
            number, origin, {n: self._receive(n) for n in before} | {self.number - 1: maps}
        )

    def _forward(self, begun: _Begun) -> None:
        """Compute a micro-batch and send its maps; keep the tensors that backward needs."""
        if self.recompute:
            arrived = {other: [*maps] for other, maps in begun.arrived.items()}
            with torch.no_grad():
                sent = self._compute(begun)
            begun.arrived = arrived
        else:
            sent = self._compute(begun)
        messages: dict[int, Any] = {}
        for other in list(sent):
            maps = [self._handed(map_, other) for map_ in sent.pop(other)]
            neighbour = other == self.number + 1
            messages[other] = (begun.number, begun.origin, maps) if neighbour else maps
            del maps
        self._send_all(messages)

    def _handed(self, map_: Tensor, other: int) -> Tensor:
        """A map on another partition's device, which says whether this one takes its gradient."""
        takes = map_.is_floating_point() if self.recompute else map_.requires_grad
        return map_.detach().to(self.flow.partitions[other].device).requires_grad_(takes)

    def _compute(self, begun: _Begun) -> dict[int, Maps]:
        """Return the maps that other partitions take, by the receiver; note backward's beginning.

        Maps that arrived are held no longer, except by layers that need them for backward.
        """
        skips = _Skips(begun.origin)
        for other in list(begun.arrived):
            maps, names = begun.arrived.pop(other), self.takes.get(other, [])
            begun.gradients[other] = [None] * len(maps)
            maps = [_arrive(map_, begun.gradients[other], n) for n, map_ in enumerate(maps)]
            if other == self.number - 1:
                x = maps.pop(0)
            skips.tensors.update(zip(names, maps, strict=True))
            del maps
        with use_skip_tracker(skips):
            output = self.part(x)
        del x
        if self.last:
            begun.end = output
            return {}
        sent: dict[int, Maps] = {}
        for other, names in self.gives.items():
            maps = [skips.tensors.pop(name) for name in names]
            if other == self.number + 1:
                maps.insert(0, output)
            if maps:
                sent[other] = maps
        begun.receivers = [*sent]
        begun.end = _Leave.apply(begun.returned, *chain(*sent.values()))  # type: ignore[no-untyped-call]
        return sent

    def _backward(self, begun: _Begun) -> None:
        """Take a micro-batch back: add parameters' gradients, and send those of arrived maps."""
        if self.recompute:
            with enable_recomputing():
                self._compute(begun)
        for other in begun.receivers:
            begun.returned += self._receive(other)
        end, begun.end = begun.end, None
        assert end is not None
        if self.last:
            end = self.measure(begun.number, end)
        if end.requires_grad:
            end.backward(None if self.last else end)  # type: ignore[no-untyped-call]
        del end
        messages: dict[int, Any] = {}
        for other in range(self.number):
            device, of_maps = self.flow.partitions[other].device, begun.gradients.pop(other, [])
            if of_maps:
                messages[other] = [g if g is None else g.to(device) for g in of_maps]
            del of_maps
        self._send_all(messages)


class _Leave(torch.autograd.Function):
    """An empty tensor that runs the backward of maps, with gradients from a list that it empties.

    torch.autograd.backward would hold all of the gradients that it is given to its end.
    """

    @staticmethod
    def forward(ctx: Any, returned: list[Tensor | None], *maps: Tensor) -> Tensor:
        ctx.returned = returned
        return torch.empty(0, device=maps[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None, *ctx.returned)
        ctx.returned.clear()
        return gradients


class _Arrive(torch.autograd.Function):
    """Hands on a map and puts its gradient into a list; the graph does not hold the map."""

    @staticmethod
    def forward(
        ctx: Any, begin: Tensor, map_: Tensor, gradients: list[Tensor | None], at: int
    ) -> Tensor:
        ctx.gradients, ctx.at = gradients, at
        ctx.set_materialize_grads(False)
        return map_.detach()

    @staticmethod
    def backward(ctx: Any, *of_map: Tensor | None) -> tuple[None, None, None, None]:
        ctx.gradients[ctx.at] = of_map[0]
        return None, None, None, None


def _arrive(map_: Tensor, gradients: list[Tensor | None], at: int) -> Tensor:
    if not map_.requires_grad:
        return map_
    begin = torch.empty(0, device=map_.device, requires_grad=True)
    arrived: Tensor = _Arrive.apply(begin, map_.detach(), gradients, at)  # type: ignore[no-untyped-call]
    return arrived
