"""Forward and backward of a sweep: strips are steps in time, backward goes from the last to the
first.

Forward keeps no activations, just the state before each strip: the rows that it looks at. Backward
computes each strip again from its state (Chen et al., "Training deep nets with sublinear memory
cost", 2016), and hands the gradient of the state on to the strip before. A sum over the last map,
such as a loss, is added up strip by strip too, so that map is never whole in memory.
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

# The term that rows of the last map add to a sum, differentiable; None for no term.
OfRows = Callable[[Tensor, Rows], Tensor | None]


@dataclass(frozen=True)
class Inputs:
    """The tensors that a sweep needs besides the image.

    Attributes:
        averages: Averages of the whole image that layers need.
        maps: Whole maps that earlier sweeps kept, by their numbers.
        parameters: Parameters of the layers that it computes.
    """

    averages: Sequence[Tensor]
    maps: Mapping[int, Tensor]
    parameters: Sequence[Tensor]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All these tensors, which get gradients."""
        return *self.averages, *self.maps.values(), *self.parameters

    @classmethod
    def of(cls, tensors: Sequence[Tensor], num_averages: int, numbers: Sequence[int]) -> "Inputs":
        """The inverse of `tensors`, for so many averages and maps of these numbers."""
        stop = num_averages + len(numbers)
        maps = dict(zip(numbers, tensors[num_averages:stop], strict=True))
        return cls(tensors[:num_averages], maps, tensors[stop:])


# Returns a sweep at the image's beginning that uses these inputs, and the maps that it keeps.
Make = Callable[[Inputs], tuple[Sweep, KeptMaps]]


def swept_sum(
    image: Tensor, make: Make, measure: OfRows, inputs: Inputs, *, keeps_states: bool = True
) -> tuple[Tensor, dict[int, Tensor]]:
    """Sweep an image, and add up the measure of the rows that strips complete.

    Args:
        image: (1, bands, H, W); it gets no gradient.
        make: Function that builds the sweep; called once more in backward.
        measure: Returns a strip's term of the sum; called once more in backward.
        inputs: The tensors that get gradients.
        keeps_states: Whether states are kept for backward; else backward sweeps once more for
            them, so that they take memory for a shorter time.

    Returns:
        The sum, and the maps that the sweep keeps, by number; both are differentiable.
    """
    numbers: list[int] = []
    split = partial(Inputs.of, num_averages=len(inputs.averages), numbers=tuple(inputs.maps))
    total, *maps = _Swept.apply(image, make, measure, keeps_states, split, numbers, *inputs.tensors)  # type: ignore[no-untyped-call]
    return total, dict(zip(numbers, maps, strict=True))


class _Swept(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        make: Make,
        measure: OfRows,
        keeps_states: bool,
        split: Callable[[Sequence[Tensor]], Inputs],
        numbers: list[int],
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
            term = measure(sweep.pass_strip(rows_of(image, plan), plan), plan.output)
            if term is not None:
                total = term if total is None else total + term
        assert total is not None, "there is something to measure"
        complete = maps.complete
        numbers += complete
        ctx.numbers = tuple(numbers)
        maps.clear()
        return total, *complete.values()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gradient, *of_maps = grads
        image, *tensors = ctx.saved_tensors
        assert ctx.plans, "states go as backward passes them, so that it passes them once"
        before = ctx.split(tensors)
        averages = [leaf.detach().requires_grad_() for leaf in before.averages]
        sweep, maps = ctx.make(Inputs(averages, before.maps, before.parameters))
        if not ctx.states:
            ctx.states = _states(sweep, image, ctx.plans)
            maps.incomplete = {}
        inputs = [*averages, *before.parameters]
        sums = [torch.zeros_like(leaf) for leaf in tensors]
        after = ctx.split(sums)
        flow = _Flow(maps, after.maps, dict(zip(ctx.numbers, of_maps, strict=True)), gradient)
        totals = [*after.averages, *after.parameters]
        hooks = [leaf.register_hook(adds(sum_)) for leaf, sum_ in zip(inputs, totals, strict=True)]
        try:
            _strips_backward(ctx, sweep, image, inputs, flow)
        finally:
            maps.clear()
            for hook in hooks:
                hook.remove()
        return None, None, None, None, None, None, *sums


@dataclass(frozen=True)
class _Flow:
    """Gradients of the results of a sweep, and those of the whole maps that it read.

    Attributes:
        maps: The maps that the sweep reads and keeps.
        read: Sums of the gradients of the maps that it reads, by number.
        kept_gradients: Gradients of the maps that it keeps, by number.
        gradient: Gradient of the sum.
    """

    maps: KeptMaps
    read: Mapping[int, Tensor]
    kept_gradients: Mapping[int, Tensor | None]
    gradient: Tensor | None

    def leaves(self) -> list[Tensor]:
        """The rows that a strip read of whole maps; hooks add up their gradients."""
        rows = list[Tensor]()
        for number, first, leaf in self.maps.read_rows:
            total = self.read[number][:, :, first : first + leaf.shape[2]]
            leaf.register_hook(adds(total))  # type: ignore[no-untyped-call]
            rows.append(leaf)
        self.maps.read_rows.clear()
        return rows

    def ends(self) -> list[tuple[GradientEdge, Tensor]]:
        """The edges at which backward begins for a strip's rows of kept maps, with gradients."""
        ends = list[tuple[GradientEdge, Tensor]]()
        for number, (first, stop), edge in self.maps.computed_rows:
            gradient = self.kept_gradients.get(number)
            if gradient is not None:
                ends.append((edge, gradient[:, :, first:stop]))
        self.maps.computed_rows.clear()
        return ends


def _strips_backward(
    ctx: Any, sweep: Sweep, image: Tensor, inputs: Sequence[Tensor], flow: _Flow
) -> None:
    """Backward of all strips, the last first; hooks add up the gradients of the inputs."""
    of_state: list[Tensor | None] = []  # gradients of the state after the strip
    while ctx.plans:
        plan = ctx.plans.pop()
        sweep.state, leaves = as_leaves(ctx.states.pop())
        with torch.enable_grad():
            measured = ctx.measure(sweep.pass_strip(rows_of(image, plan), plan), plan.output)
        ends = _ends([*of_layers(sweep.state), measured], [*of_state, flow.gradient]) + flow.ends()
        read = flow.leaves()
        # Backward does not need these tensors, only those that layers saved.
        del measured, of_state
        sweep.state = []
        of_state = [None for _ in leaves]
        if ends:
            edges, gradients = zip(*ends, strict=True)
            del ends
            tensors = [*leaves, *read, *inputs]
            results = torch.autograd.grad(edges, tensors, gradients, allow_unused=True)
            of_state = list(results[: len(leaves)])
            del edges, gradients, results


def adds(total: Tensor) -> Callable[[Tensor | None], Tensor | None]:
    """A hook that adds a gradient to a total at once, and leaves zeros that take no memory."""

    def add(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        total.add_(gradient)
        return gradient.new_zeros(()).expand_as(gradient)

    return add


def _ends(
    tensors: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
) -> list[tuple[GradientEdge, Tensor]]:
    """The edges at which backward begins, without holding the tensors, with their gradients."""
    return [
        (get_gradient_edge(end), gradient)
        for end, gradient in zip(tensors, gradients, strict=True)
        if end is not None and gradient is not None and end.requires_grad
    ]


def _states(sweep: Sweep, image: Tensor, plans: Sequence[Strip]) -> list[State]:
    """The states before each strip, from a sweep over all of them."""
    states = []
    for plan in plans:
        states.append(sweep.state)
        sweep.pass_strip(rows_of(image, plan), plan)
    return states


def rows_of(image: Tensor, plan: Strip) -> Tensor:
    """A strip's rows of the image."""
    return image[:, :, plan.image[0] : plan.image[1]]


def as_leaves(state: State) -> tuple[State, list[Tensor]]:
    """Return a copy of a state with its rows of maps as leaves of the graph, and these leaves."""
    image, *maps = state
    fresh = [
        [(first, piece.detach().requires_grad_()) for first, piece in pieces] for pieces in maps
    ]
    for piece in of_layers([image, *fresh]):
        piece.register_hook(_alone)  # type: ignore[no-untyped-call]
    return [image, *fresh], of_layers([image, *fresh])


def _alone(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient that holds no other memory, such as the rows around a view.

    It is None for a map if only its places or comparisons were used.
    """
    if gradient is None or gradient.untyped_storage().nbytes() <= gradient.nbytes:
        return gradient
    return gradient.clone()


def of_layers(state: State) -> list[Tensor]:
    """The rows of layers' maps in a state, without the image, which has no gradient."""
    return [piece for pieces in state[1:] for _, piece in pieces]
