"""Training by sweeps: strips are steps in time, and backward goes through them from the last to
the first.

Forward keeps no activations, just the state before each strip: the rows that it looks at. Backward
computes each strip again from its state (Chen et al., "Training deep nets with sublinear memory
cost", 2016), and hands the gradient of the state on to the strip before. So the price is one more
forward pass, whatever the halo, and the memory that of one strip, all states, and the logits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilenet.geometry.layers import Layer
from tilenet.geometry.sweep import Strip
from tilenet.model.network import Network
from tilenet.model.skips import Origin
from tilenet.parallel.exchange.swept import State, Sweep

__all__ = ["SweptPipe"]


class SweptPipe:
    """A network on one device whose tiles are swept; in the place of a `Pipe`.

    Args:
        network: Keeps its parameters and their names; they are moved to the device.
        layers: The network's.
        device: Where it computes.
        precision: As for `Pipe`.
        edges: For rows and columns of a tile the rows between its strips.

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
    ) -> None:
        self.network, self.devices = network.to(device), (device,)
        self.layers, self.precision, self.edges = layers, precision, edges

    def passes(self, micro_batches: int) -> int:
        """How often one backward adds to each parameter's gradient."""
        return 1

    def __call__(self, images: list[Tensor], origins: Sequence[Origin]) -> list[Tensor]:
        """Sweep one tile after another; as `Pipe`, with one sample per micro-batch."""
        return [
            self._swept(image.to(self.devices[0]), origin)
            for image, origin in zip(images, origins, strict=True)
        ]

    def _swept(self, image: Tensor, origin: Origin) -> Tensor:
        tiling = origin.tiling
        assert tiling is not None
        assert len(image) == 1
        part = tiling.tiles[origin.tiles[0]].read
        edges = self.edges(part.height, part.width)
        assert image.shape[2:] == (part.height, part.width)

        def sweep() -> Sweep:
            self.network.mask_key.images = origin.images
            size, precision = tiling.extended, self.precision
            return Sweep(self.layers, self.network, size, edges, part, precision, compact=True)

        parameters = self.network.trained
        out: Tensor = _Swept.apply(image, sweep, *parameters)  # type: ignore[no-untyped-call]
        return out


class _Swept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, make: Callable[[], Sweep], *parameters: Tensor) -> Tensor:
        sweep = make()
        ctx.make, ctx.states, ctx.plans = make, [], list(sweep.strips)
        ctx.save_for_backward(image, *parameters)
        found = []
        for plan in ctx.plans:
            if any(ctx.needs_input_grad):
                ctx.states.append(sweep.state)
            out = sweep.pass_strip(_rows(image, plan), plan)
            if out.shape[2]:  # of no rows it has the dtype of the image
                found.append(out)
        return torch.cat(found, 2)

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
                out = sweep.pass_strip(_rows(image, plan), plan)
                after = _of_layers(sweep.state)
            given = gradient[:, :, plan.output[0] : plan.output[1]]
            wanted = [(out, given), *zip(after, later, strict=True)]
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
        return None, None, *sums


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
