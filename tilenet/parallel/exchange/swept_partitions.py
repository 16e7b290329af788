"""A sweep over partitions: strips flow through them, and each keeps the rows of its layers.

A strip is a micro-batch with a state. While a partition computes a strip, the one before it
computes the next. Rows of maps that later partitions need, skips too, are sent as soon as they are
computed, and their gradients are sent back. Backward goes through the strips from the last to the
first: a partition computes a strip again from its state, as many strips ahead of its gradient as
there are partitions after it. So partitions wait at the ends alone, and received rows are not
stored.

The schedule is "one forward, one backward" (Narayanan et al., "PipeDream", SOSP 2019), with the
strips' second forward in the place of forward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tilenet.geometry.sweep import row_readers
from tilenet.parallel.exchange.swept import MapRows, State, Sweep
from tilenet.parallel.exchange.swept_backward import OfRows, adds, as_leaves, of_layers, rows_of
from tilenet.parallel.pipeline.posts import PartitionWorker, Posts


@dataclass(frozen=True)
class SweptLayers:
    """A partition of a sweep at the image's beginning.

    Attributes:
        sweep: The sweep of its layers.
        device: The device of its layers.
        parameters: Parameters of its layers, which get gradients.
    """

    sweep: Sweep
    device: torch.device
    parameters: Sequence[Tensor]


Make = Callable[[], Sequence[SweptLayers]]


def turns(num_strips: int, behind: int) -> Iterator[tuple[int | None, int | None]]:
    """Yield, for each turn of a partition, the strip that it begins, then the strip that it ends.

    Strips are counted in the order in which they are computed. A strip ends when the partitions
    after this one have ended it: in backward with its gradients.

    Args:
        behind: Number of partitions after this one.
    """
    for turn in range(num_strips + behind):
        yield turn if turn < num_strips else None, turn - behind if turn >= behind else None


def idle_share(num_strips: int, num_partitions: int) -> float:
    """Return the share of time that a partition waits, if all take the same time for a strip."""
    return (num_partitions - 1) / (num_strips + num_partitions - 1)


def swept_over_partitions(image: Tensor, make: Make, measure: OfRows) -> Tensor:
    """Sweep an image by several partitions, and add up the measure of the rows they complete.

    Args:
        image: (1, bands, H, W); it gets no gradient.
        make: Returns the partitions in order; called once more in backward.
        measure: Returns a strip's term of the sum; called in a thread of the last partition, and
            once more in backward.

    Returns:
        The sum, on the last partition's device.

    Raises:
        Exception: The first error of any partition.
    """
    parts = make()
    tensors = chain(*(part.parameters for part in parts))
    total: Tensor = _Swept.apply(image, parts, make, measure, *tensors)  # type: ignore[no-untyped-call]
    return total.to(parts[-1].device)


class _Swept(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        parts: Sequence[SweptLayers],
        make: Make,
        measure: OfRows,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.make, ctx.measure, ctx.states = make, measure, [list[State]() for _ in parts]
        ctx.save_for_backward(image, *parameters)
        keeps_states = any(ctx.needs_input_grad)
        workers = _workers(parts, image, measure)
        _run(
            [
                partial(worker.forward, states if keeps_states else None)
                for worker, states in zip(workers, ctx.states, strict=True)
            ],
            workers,
        )
        total = workers[-1].total
        assert total is not None, "there is something to measure"
        # On the host, so that backward does not wait in a thread of autograd which partitions need.
        return total.cpu()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        image, *parameters = ctx.saved_tensors
        assert ctx.states[0], "states go as backward passes them, so that it passes them once"
        parts = ctx.make()
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        computed = chain(*(part.parameters for part in parts))
        hooks = [
            parameter.register_hook(adds(sum_))
            for parameter, sum_ in zip(computed, sums, strict=True)
        ]
        workers = _workers(parts, image, ctx.measure)
        try:
            _run(
                [
                    partial(worker.backward, states, gradient.to(worker.part.device))
                    for worker, states in zip(workers, ctx.states, strict=True)
                ],
                workers,
            )
        finally:
            for hook in hooks:
                hook.remove()
        return None, None, None, None, *sums


@dataclass
class _Strip:
    """A strip that was computed again and waits for gradients.

    Attributes:
        state: Leaves of the state before it.
        arrived: Leaves of the received rows, by their sender.
        after: Edges at which backward begins for the state after it; None without a gradient.
        sent: Edges of the rows that were sent, by their receiver.
        measured: Edge of the measured term.
    """

    state: list[Tensor]
    arrived: dict[int, list[Tensor]]
    after: list[GradientEdge | None]
    sent: dict[int, list[GradientEdge | None]]
    measured: GradientEdge | None


class _Worker(PartitionWorker):
    """A partition's work on its strips, in a thread of its own.

    Args:
        number: Number of the partition.
        parts: All partitions.
        image: The image, see `swept_over_partitions`.
        measure: Measure of rows, see `swept_over_partitions`.
        posts: Messages from one partition to another.
    """

    def __init__(
        self,
        number: int,
        parts: Sequence[SweptLayers],
        image: Tensor,
        measure: OfRows,
        posts: Posts,
    ) -> None:
        super().__init__(number, posts)
        self.part = parts[number]
        self.sweep, self.image, self.measure = self.part.sweep, image, measure
        self.plans = list(self.sweep.strips)
        self.total: Tensor | None = None
        self.before, self.behind = range(number), range(number + 1, len(parts))
        self.devices = [part.device for part in parts]
        readers = row_readers(self.sweep.layers)
        self.reads = [{map_ for n in part.sweep.own for map_ in readers[n]} for part in parts]

    def forward(self, states: list[State] | None) -> None:
        """Compute all strips; the last partition adds up the measure.

        Args:
            states: Gets the state before each strip; None if states are not kept.
        """
        with torch.no_grad():
            for begun, ended in turns(len(self.plans), len(self.behind)):
                if begun is not None:
                    if states is not None:
                        states.append(self.sweep.state)
                    measured = self._pass(begun, {n: self._receive(n) for n in self.before})
                    self._send_rows()
                    if measured is not None:
                        self.total = measured if self.total is None else self.total + measured
                if ended is not None:  # so that no partition runs far ahead of the next
                    for other in self.behind[:1]:
                        self._receive(other)
                    for other in self.before[-1:]:
                        self._send(other, None)

    def backward(self, states: list[State], gradient: Tensor) -> None:
        """Compute all strips again, the last first; hooks add up the parameters' gradients.

        Args:
            states: The states that `forward` added; they are removed.
            gradient: Gradient of the total.
        """
        waiting, of_state = list[_Strip](), list[Tensor | None]()
        for begun, ended in turns(len(self.plans), len(self.behind)):
            if begun is not None:
                waiting.append(self._recompute(len(self.plans) - 1 - begun, states.pop()))
            if ended is not None:
                of_state = self._backpropagate(waiting.pop(0), of_state, gradient)

    def _pass(self, strip: int, arrived: Mapping[int, list[MapRows]]) -> Tensor | None:
        """Compute a strip; return its term of the sum."""
        plan = self.plans[strip]
        rows = rows_of(self.image, plan)
        rows = rows if self.sweep.reads_image else rows[:, :, :0]
        logits = self.sweep.pass_strip(rows.to(self.part.device), plan, chain(*arrived.values()))
        return None if self.behind else self.measure(logits, plan.output)

    def _recompute(self, strip: int, state: State) -> _Strip:
        """Compute a strip again from its state, for backward."""
        self.sweep.state, leaves = as_leaves(state)
        arrived = {
            other: [(n, first, rows.requires_grad_()) for n, first, rows in self._receive(other)]
            for other in self.before
        }
        with torch.enable_grad():
            measured = self._pass(strip, arrived)
        after = [_edge(rows) for rows in of_layers(self.sweep.state)]
        # Backward does not need these tensors, only those that layers saved.
        self.sweep.state = []
        return _Strip(
            leaves,
            {other: [rows for *_, rows in maps] for other, maps in arrived.items()},
            after,
            self._send_rows(),
            None if measured is None else _edge(measured),
        )

    def _backpropagate(
        self, strip: _Strip, of_state: list[Tensor | None], gradient: Tensor
    ) -> list[Tensor | None]:
        """Backward of a strip; return the gradients of the state before it.

        Args:
            of_state: Gradients of the state after it; empty for the last strip.
        """
        gradients = [*(of_state or [None] * len(strip.after)), gradient]
        edges = [*strip.after, strip.measured]
        del of_state
        for other in self.behind:
            edges += strip.sent[other]
            gradients += self._receive(other)
        ends = [
            (edge, of_edge)
            for edge, of_edge in zip(edges, gradients, strict=True)
            if edge is not None and of_edge is not None
        ]
        del edges, gradients
        leaves = [*strip.state, *chain(*strip.arrived.values()), *self.part.parameters]
        of_leaves: list[Tensor | None] = [None] * len(leaves)
        if ends:
            begins, gradients = map(list, zip(*ends, strict=True))
            del ends
            of_leaves = list(torch.autograd.grad(begins, leaves, gradients, allow_unused=True))
        stop, messages = len(strip.state), dict[int, list[Tensor | None]]()
        before, of_leaves = of_leaves[:stop], of_leaves[stop:]
        for other, arrived in strip.arrived.items():
            of_rows, of_leaves = of_leaves[: len(arrived)], of_leaves[len(arrived) :]
            device = self.devices[other]
            messages[other] = [None if rows is None else rows.to(device) for rows in of_rows]
            del of_rows
        del of_leaves
        self._send_all(messages)
        return before

    def _send_rows(self) -> dict[int, list[GradientEdge | None]]:
        """Send computed rows to the partitions that need them; return the edges of these rows."""
        edges, messages = {}, {}
        for other in self.behind:
            maps = [rows for rows in self.sweep.rows_for_others if rows[0] in self.reads[other]]
            device = self.devices[other]
            messages[other] = [(n, first, rows.detach().to(device)) for n, first, rows in maps]
            edges[other] = [_edge(rows) for *_, rows in maps]
            del maps
        self.sweep.rows_for_others = []
        self._send_all(messages)
        return edges


def _edge(rows: Tensor) -> GradientEdge | None:
    return get_gradient_edge(rows) if rows.requires_grad else None


def _workers(parts: Sequence[SweptLayers], image: Tensor, measure: OfRows) -> list[_Worker]:
    posts = Posts(len(parts))
    return [_Worker(number, parts, image, measure, posts) for number in range(len(parts))]


def _run(works: Sequence[Callable[[], None]], workers: Sequence[_Worker]) -> None:
    """Run each worker in a thread; raise the first error of any of them here."""
    posts = workers[0].posts
    threads = [
        Thread(target=posts.work, args=(worker.part.device, work))
        for worker, work in zip(workers, works, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        posts.end()  # where a signal ends the wait
    if posts.errors:
        raise posts.errors[0]
