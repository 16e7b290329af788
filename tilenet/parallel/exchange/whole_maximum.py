"""The largest value of the whole image when its tiles lie on several ranks.

Each rank takes the largest value of its own cells, and then the largest over the ranks. Of equal
cells the first of the whole map gets the gradient, row by row, as in torch's pools; or all of them
share it, as in torch's `amax`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tilenet.mpi import Intracomm
from tilenet.parallel.exchange.halo import part_of
from tilenet.parallel.exchange.whole_maps import AveragedOver
from tilenet.parallel.sums.all_reduce import add_over, find_largest_over


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
        images = torch.tensor(where.cells.images, device=x.device)
        values, places = _own_largest(x, where)
        largest = find_largest_over(comm, _largest_of_images(values, images))
        # The smallest place among those of the largest value; NaN counts as larger than any.
        of_image = largest[images]
        places[~((values == of_image) | (values.isnan() & of_image.isnan()))] = -torch.inf
        ctx.chosen = find_largest_over(comm, _largest_of_images(places, images))[images] == places
        ctx.shape, ctx.places, ctx.where, ctx.comm, ctx.images = (
            x.shape,
            places,
            where,
            comm,
            images,
        )
        return largest[images][..., None, None].to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = grads
        total = _summed(gradient[..., 0, 0], ctx.images, ctx.comm).to(gradient.dtype)
        to_x = gradient.new_zeros(ctx.shape)
        where: AveragedOver = ctx.where
        for sample, (own, (row, col)) in enumerate(zip(where.cells.own, where.firsts, strict=True)):
            channels = ctx.chosen[sample].nonzero()[:, 0]
            number = (-ctx.places[sample, channels]).long()
            rows, cols = number // where.size[1] - row, number % where.size[1] - col
            part = part_of(to_x[sample : sample + 1], own, 0, 0)[0]
            part[channels, rows, cols] = total[sample, channels]
        return to_x, None, None


class _SharedMaximum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, where: AveragedOver, comm: Intracomm | None) -> Tensor:
        images = torch.tensor(where.cells.images, device=x.device)
        values, _ = _own_largest(x, where)
        largest = find_largest_over(comm, _largest_of_images(values, images))[images]
        y = largest[..., None, None].to(x.dtype)
        equal = [cells == y[sample] for sample, cells in enumerate(_own_cells(x, where))]
        counts = torch.stack([cells.sum((1, 2)) for cells in equal])
        ctx.save_for_backward(x, y)
        ctx.count = _summed(counts, images, comm)
        ctx.where, ctx.comm, ctx.images = where, comm, images
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = grads
        x, y = ctx.saved_tensors
        each = (_summed(gradient[..., 0, 0], ctx.images, ctx.comm) / ctx.count).to(gradient.dtype)
        to_x = torch.zeros_like(x)
        parts = zip(_own_cells(to_x, ctx.where), _own_cells(x, ctx.where), strict=True)
        for sample, (part, cells) in enumerate(parts):
            torch.mul(each[sample, :, None, None], cells == y[sample], out=part)
        return to_x, None, None


def _own_cells(x: Tensor, where: AveragedOver) -> list[Tensor]:
    """Each sample's own cells (C, H, W)."""
    own = enumerate(where.cells.own)
    return [part_of(x[sample : sample + 1], window, 0, 0)[0] for sample, window in own]


def _summed(values: Tensor, images: Tensor, comm: Intracomm | None) -> Tensor:
    """Sums of samples' values (B, C) over their images and the ranks, (B, C), float64."""
    folded = values.new_zeros((int(images.max()) + 1, values.shape[1]), dtype=torch.float64)
    folded.index_add_(0, images, values.double())
    return add_over(comm, folded)[images]


def _own_largest(x: Tensor, where: AveragedOver) -> tuple[Tensor, Tensor]:
    """The largest of each sample's own cells, (B, C), and minus its place in the whole map."""
    values = torch.full(x.shape[:2], -torch.inf, dtype=torch.float64, device=x.device)
    places = values.clone()
    for sample, (own, (row, col)) in enumerate(zip(where.cells.own, where.firsts, strict=True)):
        cells = part_of(x[sample : sample + 1], own, 0, 0)[0]
        if cells.numel():
            maximum = cells.flatten(1).max(1)
            rows, cols = maximum.indices // own.width + row, maximum.indices % own.width + col
            values[sample] = maximum.values.double()
            places[sample] = -(rows * where.size[1] + cols).double()
    return values, places


def _largest_of_images(values: Tensor, images: Tensor) -> Tensor:
    """The largest values (B, C) of samples as those of images, (images, C)."""
    empty = values.new_full((int(images.max()) + 1, values.shape[1]), -torch.inf)
    return empty.index_reduce(0, images, values, "amax")
