"""Forward and backward of a sweep: strips are steps in time, backward goes from the last to the
first.

Forward keeps no activations, just the state before each strip: the rows that it looks at. Backward
computes each strip again from its state (Chen et al., "Training deep nets with sublinear memory
cost", 2016), and hands the gradient of the state on to the strip before. What is measured of the
last map, such as a loss, is measured strip by strip too, so that map is never whole in memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tilenet.geometry.sweep import Rows, Strip
from tilenet.parallel.exchange.swept import KeptMaps, State, Sweep

__all__ = ["Inputs", "OfRows", "adds", "as_leaves", "of_layers", "rows_of", "swept_sum"]

# What rows of the last map add to a sum, differentiable; None: nothing.
OfRows = Callable[[Tensor, Rows], Tensor | None]


@dataclass(frozen=True)
class Inputs:
    """What a sweep takes besides the image.

    Attributes:
        given: What layers take of the whole image.
        maps: Whole maps that sweeps before it kept, by their numbers.
        parameters: Of the layers that it computes.
    """

    given: Sequence[Tensor]
    maps: Mapping[int, Tensor]
    parameters: Sequence[Tensor]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, which get gradients."""
        return *self.given, *self.maps.values(), *self.parameters

    @classmethod
    def of(cls, tensors: Sequence[Tensor], num_given: int, numbers: Sequence[int]) -> "Inputs":
        """Those of `tensors`, with so many given ones and maps of these numbers."""
        stop = num_given + len(numbers)
        maps = dict(zip(numbers, tensors[num_given:stop], strict=True))
        return cls(tensors[:num_given], maps, tensors[stop:])


# A sweep at the image's beginning that takes these, and what it keeps.
Make = Callable[[Inputs], tuple[Sweep, KeptMaps]]


def swept_sum(
    image: Tensor, make: Make, measure: OfRows, inputs: Inputs, *, keeps_states: bool = True
) -> tuple[Tensor, dict[int, Tensor]]:
    """Sweep an image, and add up what is measured of the rows that strips complete.

    Args:
        image: (1, bands, H, W); it gets no gradient.
        make: Is called in backward once more.
        measure: Is called in backward once more.
        inputs: They get gradients.
        keeps_states: Whether states are kept for backward; else it sweeps once more for them, so
            that they take memory for a shorter time.

    Returns:
        The sum, and the maps that the sweep keeps, by number; of these gradients are handed on.
    """
    kept: list[int] = []
    split = partial(Inputs.of, num_given=len(inputs.given), numbers=tuple(inputs.maps))
    total, *maps = _Swept.apply(image, make, measure, keeps_states, split, kept, *inputs.tensors)  # type: ignore[no-untyped-call]
    return total, dict(zip(kept, maps, strict=True))


class _Swept(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        make: Make,
        measure: OfRows,
        keeps_states: bool,
        split: Callable[[Sequence[Tensor]], Inputs],
        kept: list[int],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        sweep, maps = make(split(tensors))
        ctx.make, ctx.measure, ctx.split = make, measure, split
        ctx.plans, ctx.states = list(sweep.strips), list[State]()
        ctx.save_for_backward(image, *tensors)
        ctx.set_materialize_grads(False)
        keeps_states = keeps_states and any(ctx.needs_input_grad)
        total: Tensor | None = None
        for plan in ctx.plans:
            if keeps_states:
                ctx.states.append(sweep.state)
            found = measure(sweep.pass_strip(rows_of(image, plan), plan), plan.output)
            if found is not None:
                total = found if total is None else total + found
        assert total is not None, "there is something to measure"
        come = maps.come
        kept += come
        ctx.numbers = tuple(kept)
        maps.clear()
        return total, *come.values()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gradient, *of_kept = grads
        image, *tensors = ctx.saved_tensors
        assert ctx.plans, "states go as backward passes them, so that it passes them once"
        before = ctx.split(tensors)
        given = [one.detach().requires_grad_() for one in before.given]
        sweep, maps = ctx.make(Inputs(given, before.maps, before.parameters))
        if not ctx.states:
            ctx.states = _states(sweep, image, ctx.plans)
            maps.coming = {}
        inputs = [*given, *before.parameters]
        sums = [torch.zeros_like(one) for one in tensors]
        after = ctx.split(sums)
        flow = _Flow(maps, after.maps, dict(zip(ctx.numbers, of_kept, strict=True)), gradient)
        totals = [*after.given, *after.parameters]
        hooks = [one.register_hook(adds(sum_)) for one, sum_ in zip(inputs, totals, strict=True)]
        try:
            _strips_back(ctx, sweep, image, inputs, flow)
        finally:
            maps.clear()
            for hook in hooks:
                hook.remove()
        return None, None, None, None, None, None, *sums


@dataclass(frozen=True)
class _Flow:
    """Gradients that come from what follows a sweep, and those that go to the maps it took.

    Attributes:
        maps: What the sweep takes and keeps.
        taken: Sums of the gradients of whole maps that it takes, by number.
        kept: Gradients of those that it keeps.
        gradient: Of the sum.
    """

    maps: KeptMaps
    taken: Mapping[int, Tensor]
    kept: Mapping[int, Tensor | None]
    gradient: Tensor | None

    def leaves(self) -> list[Tensor]:
        """The rows that a strip took of whole maps, whose gradients are added up as they come."""
        rows = list[Tensor]()
        for number, first, leaf in self.maps.taken:
            total = self.taken[number][:, :, first : first + leaf.shape[2]]
            leaf.register_hook(adds(total))  # type: ignore[no-untyped-call]
            rows.append(leaf)
        self.maps.taken.clear()
        return rows

    def ends(self) -> list[tuple[GradientEdge, Tensor]]:
        """Where backward begins for the rows of kept maps that a strip computed."""
        found = list[tuple[GradientEdge, Tensor]]()
        for number, (first, stop), edge in self.maps.given:
            gradient = self.kept.get(number)
            if gradient is not None:
                found.append((edge, gradient[:, :, first:stop]))
        self.maps.given.clear()
        return found


def _strips_back(
    ctx: Any, sweep: Sweep, image: Tensor, inputs: Sequence[Tensor], flow: _Flow
) -> None:
    """Backward of all strips, the last first; hooks of the inputs take their gradients."""
    later: list[Tensor | None] = []  # gradients of the state after the strip
    while ctx.plans:
        plan = ctx.plans.pop()
        sweep.state, leaves = as_leaves(ctx.states.pop())
        with torch.enable_grad():
            measured = ctx.measure(sweep.pass_strip(rows_of(image, plan), plan), plan.output)
        ends = _ends([*of_layers(sweep.state), measured], [*later, flow.gradient]) + flow.ends()
        taken = flow.leaves()
        # Backward needs none of these, but what layers keep for it.
        del measured, later
        sweep.state = []
        later = [None for _ in leaves]
        if ends:
            edges, their = zip(*ends, strict=True)
            del ends
            asked = [*leaves, *taken, *inputs]
            found = torch.autograd.grad(edges, asked, their, allow_unused=True)
            later = list(found[: len(leaves)])
            del edges, their, found


def adds(total: Tensor) -> Callable[[Tensor | None], Tensor | None]:
    """Adds a gradient to a total as soon as it comes; what waits in its place takes no memory."""

    def add(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        total.add_(gradient)
        return gradient.new_zeros(()).expand_as(gradient)

    return add


def _ends(
    tensors: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
) -> list[tuple[GradientEdge, Tensor]]:
    """Where backward begins, without the tensors that lie there, and with which gradients."""
    return [
        (get_gradient_edge(end), one)
        for end, one in zip(tensors, gradients, strict=True)
        if end is not None and one is not None and end.requires_grad
    ]


def _states(sweep: Sweep, image: Tensor, plans: Sequence[Strip]) -> list[State]:
    """The state before each strip."""
    states = []
    for plan in plans:
        states.append(sweep.state)
        sweep.pass_strip(rows_of(image, plan), plan)
    return states


def rows_of(image: Tensor, plan: Strip) -> Tensor:
    """A strip's rows of the image."""
    return image[:, :, plan.image[0] : plan.image[1]]


def as_leaves(state: State) -> tuple[State, list[Tensor]]:
    """A state that gradients are taken of, and the tensors of which they are."""
    image, *maps = state
    fresh = [
        [(first, piece.detach().requires_grad_()) for first, piece in pieces] for pieces in maps
    ]
    for piece in of_layers([image, *fresh]):
        piece.register_hook(_alone)  # type: ignore[no-untyped-call]
    return [image, *fresh], of_layers([image, *fresh])


def _alone(gradient: Tensor | None) -> Tensor | None:
    """A gradient that keeps nothing else in memory, such as that of all rows it came with.

    There is none of a map of which only places or comparisons were taken.
    """
    if gradient is None or gradient.untyped_storage().nbytes() <= gradient.nbytes:
        return gradient
    return gradient.clone()


def of_layers(state: State) -> list[Tensor]:
    """The rows of layers' maps; the image has no gradient."""
    return [piece for pieces in state[1:] for _, piece in pieces]
