"""The largest value of the whole image when its tiles lie on several ranks.

Each rank takes the largest value of its own cells, and then the largest over the ranks. Of equal
cells the first of the whole map gets the gradient, row by row, as in torch's pools; or all of them
share it, as in torch's `amax`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tilenet.model.upload import upload
from tilenet.mpi import Intracomm
from tilenet.parallel.exchange.whole_maps import AveragedOver, sum_images
from tilenet.parallel.sums.all_reduce import find_largest_over


class WholeImageMaximum(nn.Module):
    """Maxima over all ranks, (B, C, H, W) to (B, C, 1, 1). Collective.

    Args:
        where: Returns the own cells of the micro-batch that the thread computes.
        comm: The ranks that hold the same images, for one partition; None for a rank alone.
        shared: Whether equal cells share the gradient.
    """

    def __init__(
        self,
        where: Callable[[], AveragedOver],
        comm: Intracomm | None,
        *,
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.where, self.comm, self.shared = where, comm, shared

    def forward(self, x: Tensor) -> Tensor:
        function = _SharedMaximum if self.shared else _Maximum
        y: Tensor = function.apply(x, self.where(), self.comm)  # type: ignore[no-untyped-call]
        return y


class _Maximum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, where: AveragedOver, comm: Intracomm | None) -> Tensor:
        values, places = _own_largest(x, where)
        largest = _find_largest(values, where, comm)
        # The smallest place among those of the largest value; NaN counts as larger than any.
        places[~((values == largest) | (values.isnan() & largest.isnan()))] = -torch.inf
        ctx.chosen = _find_largest(places, where, comm) == places
        ctx.shape, ctx.places, ctx.where, ctx.comm = x.shape, places, where, comm
        return largest[..., None, None].to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = grads
        where: AveragedOver = ctx.where
        total = sum_images(gradient[..., 0, 0], where, ctx.comm).to(gradient.dtype)
        to_x = gradient.new_zeros(ctx.shape)
        parts = zip(where.cells.of(to_x), where.firsts, strict=True)
        for sample, (part, (row, col)) in enumerate(parts):
            channels = ctx.chosen[sample].nonzero()[:, 0]
            number = (-ctx.places[sample, channels]).long()
            rows, cols = number // where.size[1] - row, number % where.size[1] - col
            part[0, channels, rows, cols] = total[sample, channels]
        return to_x, None, None


class _SharedMaximum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, where: AveragedOver, comm: Intracomm | None) -> Tensor:
        values, _ = _own_largest(x, where)
        y = _find_largest(values, where, comm)[..., None, None].to(x.dtype)
        equal = [cells == y[sample] for sample, cells in enumerate(where.cells.of(x))]
        ctx.save_for_backward(x, y)
        ctx.count = sum_images(torch.cat([cells.sum((2, 3)) for cells in equal]), where, comm)
        ctx.where, ctx.comm = where, comm
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = grads
        x, y = ctx.saved_tensors
        where: AveragedOver = ctx.where
        total = sum_images(gradient[..., 0, 0], where, ctx.comm)
        each = (total / ctx.count).to(gradient.dtype)
        to_x = torch.zeros_like(x)
        parts = zip(where.cells.of(to_x), where.cells.of(x), strict=True)
        for sample, (part, cells) in enumerate(parts):
            torch.mul(each[sample, :, None, None], cells == y[sample], out=part)
        return to_x, None, None


def _own_largest(x: Tensor, where: AveragedOver) -> tuple[Tensor, Tensor]:
    """The largest of each sample's own cells, (B, C), and minus its place in the whole map."""
    values = torch.full(x.shape[:2], -torch.inf, dtype=torch.float64, device=x.device)
    places = values.clone()
    parts = zip(where.cells.of(x), where.firsts, strict=True)
    for sample, (cells, (row, col)) in enumerate(parts):
        if cells.numel():
            maximum, width = cells[0].flatten(1).max(1), cells.shape[3]
            rows, cols = maximum.indices // width + row, maximum.indices % width + col
            values[sample] = maximum.values.double()
            places[sample] = -(rows * where.size[1] + cols).double()
    return values, places


def _find_largest(values: Tensor, where: AveragedOver, comm: Intracomm | None) -> Tensor:
    """The largest of samples' values (B, C) over their images and the ranks, (B, C)."""
    images = upload(torch.tensor(where.cells.images), values.device)
    empty = values.new_full((max(where.cells.images) + 1, values.shape[1]), -torch.inf)
    largest = empty.scatter_reduce(0, images[:, None].expand_as(values), values, "amax")
    return find_largest_over(comm, largest)[images]
