"""Forward and backward of a sweep: strips are steps in time, backward goes from the last to the
first.

Forward keeps no activations, just the state before each strip: the rows that it looks at. Backward
computes each strip again from its state (Chen et al., "Training deep nets with sublinear memory
cost", 2016), and hands the gradient of the state on to the strip before. What is measured of the
last map, such as a loss, is measured strip by strip too, so that nobody holds that map.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tilenet.geometry.sweep import Rows, Strip
from tilenet.parallel.exchange.swept import State, Sweep

__all__ = ["OfRows", "swept_sum"]

# What rows of the last map add to a sum, differentiable; None: nothing.
OfRows = Callable[[Tensor, Rows], Tensor | None]


def swept_sum(
    image: Tensor,
    make: Callable[[Sequence[Tensor]], Sweep],
    measure: OfRows,
    given: Sequence[Tensor],
    parameters: Sequence[Tensor],
    *,
    keeps_states: bool = True,
) -> Tensor:
    """Sweep an image, and add up what is measured of the rows that strips complete.

    Args:
        image: (1, bands, H, W); it gets no gradient.
        make: A sweep at the image's beginning, with tensors like the given ones.
        measure: Is called in backward once more.
        given: What layers take of the whole image; they get gradients.
        parameters: Of the sweep's layers; they get gradients.
        keeps_states: Whether states are kept for backward; else it sweeps once more for them, so
            that they take memory for a shorter time.
    """
    tensors = (*given, *parameters)
    total: Tensor = _Swept.apply(image, make, measure, keeps_states, len(given), *tensors)  # type: ignore[no-untyped-call]
    return total


class _Swept(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        make: Callable[[Sequence[Tensor]], Sweep],
        measure: OfRows,
        keeps_states: bool,
        num_given: int,
        *tensors: Tensor,
    ) -> Tensor:
        sweep = make(tensors[:num_given])
        ctx.make, ctx.measure, ctx.num_given = make, measure, num_given
        ctx.plans, ctx.states = list(sweep.strips), list[State]()
        ctx.save_for_backward(image, *tensors)
        keeps_states = keeps_states and any(ctx.needs_input_grad)
        total: Tensor | None = None
        for plan in ctx.plans:
            if keeps_states:
                ctx.states.append(sweep.state)
            found = measure(sweep.pass_strip(_rows(image, plan), plan), plan.output)
            if found is not None:
                total = found if total is None else total + found
        assert total is not None, "there is something to measure"
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = grads
        image, *tensors = ctx.saved_tensors
        assert ctx.plans, "states go as backward passes them, so that it passes them once"
        given = [one.detach().requires_grad_() for one in tensors[: ctx.num_given]]
        inputs, sweep = [*given, *tensors[ctx.num_given :]], ctx.make(given)
        if not ctx.states:
            ctx.states = _states(sweep, image, ctx.plans)
        sums = [torch.zeros_like(one) for one in inputs]
        hooks = [one.register_hook(_adds(total)) for one, total in zip(inputs, sums, strict=True)]
        try:
            _strips_back(ctx, sweep, image, inputs, gradient)
        finally:
            for hook in hooks:
                hook.remove()
        return None, None, None, None, None, *sums


def _strips_back(
    ctx: Any, sweep: Sweep, image: Tensor, inputs: Sequence[Tensor], gradient: Tensor
) -> None:
    """Backward of all strips, the last first; hooks of the inputs take their gradients."""
    later: list[Tensor | None] = []  # gradients of the state after the strip
    while ctx.plans:
        plan = ctx.plans.pop()
        sweep.state, leaves = _as_leaves(ctx.states.pop())
        with torch.enable_grad():
            measured = ctx.measure(sweep.pass_strip(_rows(image, plan), plan), plan.output)
        ends = _ends([*_of_layers(sweep.state), measured], [*later, gradient])
        # Backward needs none of these, but what layers keep for it.
        del measured, later
        sweep.state = []
        later = [None for _ in leaves]
        if ends:
            edges, their = zip(*ends, strict=True)
            del ends
            found = torch.autograd.grad(edges, [*leaves, *inputs], their, allow_unused=True)
            later = list(found[: len(leaves)])
            del edges, their, found


def _adds(total: Tensor) -> Callable[[Tensor | None], Tensor | None]:
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
        sweep.pass_strip(_rows(image, plan), plan)
    return states


def _rows(image: Tensor, plan: Strip) -> Tensor:
    return image[:, :, plan.image[0] : plan.image[1]]


def _as_leaves(state: State) -> tuple[State, list[Tensor]]:
    """A state that gradients are taken of, and the tensors of which they are."""
    image, *maps = state
    fresh = [
        [(first, piece.detach().requires_grad_()) for first, piece in pieces] for pieces in maps
    ]
    for piece in _of_layers([image, *fresh]):
        piece.register_hook(_alone)  # type: ignore[no-untyped-call]
    return [image, *fresh], _of_layers([image, *fresh])


def _alone(gradient: Tensor | None) -> Tensor | None:
    """A gradient that keeps nothing else in memory, such as that of all rows it came with.

    There is none of a map of which only places or comparisons were taken.
    """
    if gradient is None or gradient.untyped_storage().nbytes() <= gradient.nbytes:
        return gradient
    return gradient.clone()


def _of_layers(state: State) -> list[Tensor]:
    """The rows of layers' maps; the image has no gradient."""
    return [piece for pieces in state[1:] for _, piece in pieces]
