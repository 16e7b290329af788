"""Training by sweeps: strips are steps in time, and backward goes through them from the last to
the first.

Forward keeps no activations, just the state before each strip: the rows that it looks at. Backward
computes each strip again from its state (Chen et al., "Training deep nets with sublinear memory
cost", 2016), and hands the gradient of the state on to the strip before. The loss is taken strip by
strip too, so that nobody holds the logits. So the price is one more forward pass, whatever the
halo, and the memory that of one strip and all states.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilenet.geometry.layers import Layer
from tilenet.geometry.ownership import tiling_shares
from tilenet.geometry.sweep import Rows, Strip
from tilenet.geometry.tiles import Tile, owned
from tilenet.geometry.windows import Window, overlap
from tilenet.model.network import Network
from tilenet.model.skips import Origin
from tilenet.parallel.exchange.halo import Line
from tilenet.parallel.exchange.swept import Columns, State, Sweep

__all__ = ["Measure", "SweptPipe"]

# What the logits (1, K, H, W) of a window of the image add to a sum; differentiable.
Measure = Callable[[Tensor, Window], Tensor]


class SweptPipe:
    """A network on one device whose tiles are swept; in the place of a `Pipe`.

    Args:
        network: Keeps its parameters and their names; they are moved to the device.
        layers: The network's.
        device: Where it computes.
        precision: As for `Pipe`.
        edges: For rows and columns of a tile the rows between its strips.
        line: To the ranks of an image, which hold columns of it each where tiles have no halo.

    Raises:
        TilenetError: A layer needs something of the whole image.
    """

    def __init__(
        self,
        network: Network,
        layers: tuple[Layer, ...],
        device: torch.device,
        precision: str,
        edges: Callable[[int, int], Sequence[int]],
        line: Line | None = None,
    ) -> None:
        self.network, self.devices = network.to(device), (device,)
        self.layers, self.precision, self.edges, self.line = layers, precision, edges, line

    def passes(self, micro_batches: int) -> int:
        """How often one backward adds to each parameter's gradient."""
        return 1

    def __call__(self, image: Tensor, origin: Origin, measure: Measure) -> Tensor:
        """Sweep a tile, and add up what is measured on the pixels that it owns.

        Collective over the ranks of an image where they hold columns of it, as is backward.

        Args:
            image: What the tile reads, (1, bands, H, W).
            origin: Which tile it is.
            measure: Is called for the own pixels of each strip, in backward once more.
        """
        tiling = origin.tiling
        assert tiling is not None
        assert len(image) == 1
        number = origin.tiles[0]
        tile = tiling.tiles[number]
        part, columns = tile.read, None
        # Of the widest, so that strips of all ranks are the same.
        edges = self.edges(part.height, max(span.read for span in tiling.cols))
        assert image.shape[2:] == (part.height, part.width)
        if tiling.rule.exchanged and len(tiling.cols) > 1:
            assert self.line is not None
            columns = Columns(tiling_shares(self.layers, tiling)[1], number, self.line)

        def sweep() -> Sweep:
            self.network.mask_key.images = origin.images
            size, of = tiling.extended, None if columns else part
            return Sweep(
                self.layers, self.network, size, edges, of, self.precision, columns, compact=True
            )

        def of_own(logits: Tensor, rows: Rows) -> Tensor | None:
            read = Window(part.row + rows[0], part.col, rows[1] - rows[0], part.width)
            own = overlap(tile.own, read) if read.height else None
            return None if own is None else measure(owned(logits, Tile(read, own)), own)

        parameters, image = self.network.trained, image.to(self.devices[0])
        total: Tensor = _Swept.apply(image, sweep, of_own, *parameters)  # type: ignore[no-untyped-call]
        return total


class _Swept(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        make: Callable[[], Sweep],
        measure: Callable[[Tensor, Rows], Tensor | None],
        *parameters: Tensor,
    ) -> Tensor:
        sweep = make()
        ctx.make, ctx.measure, ctx.states, ctx.plans = make, measure, [], list(sweep.strips)
        ctx.save_for_backward(image, *parameters)
        total: Tensor | None = None
        for plan in ctx.plans:
            if any(ctx.needs_input_grad):
                ctx.states.append(sweep.state)
            found = measure(sweep.pass_strip(_rows(image, plan), plan), plan.output)
            if found is not None:
                total = found if total is None else total + found
        assert total is not None, "a tile owns pixels"
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = grads
        image, *parameters = ctx.saved_tensors
        assert ctx.plans, "states go as backward passes them, so that it passes them once"
        sweep = ctx.make()
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        later: list[Tensor | None] = []  # gradients of the state after the strip
        while ctx.plans:
            plan, state = ctx.plans.pop(), ctx.states.pop()
            with torch.enable_grad():
                sweep.state, leaves = _as_leaves(state)
                measured = ctx.measure(sweep.pass_strip(_rows(image, plan), plan), plan.output)
                after = _of_layers(sweep.state)
            wanted = [*zip(after, later, strict=True)]
            if measured is not None:
                wanted.append((measured, gradient))
            ends = [(end, one) for end, one in wanted if one is not None and end.requires_grad]
            if not ends:
                later = [None for _ in leaves]
                continue
            starts = [*leaves, *parameters]
            found = torch.autograd.grad(
                [end for end, _ in ends], starts, [one for _, one in ends], allow_unused=True
            )
            later = list(found[: len(leaves)])
            for total, one in zip(sums, found[len(leaves) :], strict=True):
                if one is not None:
                    total += one
        return None, None, None, *sums


def _rows(image: Tensor, plan: Strip) -> Tensor:
    return image[:, :, plan.image[0] : plan.image[1]]


def _as_leaves(state: State) -> tuple[State, list[Tensor]]:
    """A state that gradients are taken of, and the tensors of which they are."""
    image, *maps = state
    fresh = [
        [(first, piece.detach().requires_grad_()) for first, piece in pieces] for pieces in maps
    ]
    return [image, *fresh], _of_layers([image, *fresh])


def _of_layers(state: State) -> list[Tensor]:
    """The rows of layers' maps; the image has no gradient."""
    return [piece for pieces in state[1:] for _, piece in pieces]
