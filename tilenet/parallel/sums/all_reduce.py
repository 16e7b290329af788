"""Sums and maxima of float64 values over ranks; through one kind of sum gradients flow."""

from typing import Any, Literal

import torch
from torch import Tensor

from tilenet.mpi import Intracomm
from tilenet.parallel.health.exchange_clock import EXCHANGING


def sum_with_gradient(x: Tensor, comm: Intracomm | None) -> Tensor:
    """The sum of `x` over the ranks, on each of them. Collective, in forward and in backward.

    It is its own adjoint: gradients of each rank's copy of the sum flow back to all. So ranks that
    compute one loss from it alike must each take their share of that loss, 1 / `comm.size`.

    Args:
        x: float64, needs a gradient on all ranks or on none of them.
    """
    total: Tensor = _Sum.apply(x, comm)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Intracomm | None) -> Tensor:
        ctx.comm = comm
        return add_over(comm, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return add_over(ctx.comm, grads[0]), None


def add_over(comm: Intracomm | None, values: Tensor) -> Tensor:
    """The sum of float64 values over ranks. Collective; `comm` is None for a rank alone."""
    return _reduce(comm, values, "SUM")


def find_largest_over(comm: Intracomm | None, values: Tensor) -> Tensor:
    """The largest of float64 values over ranks, as torch has it: NaN where any of them is.

    Collective; `comm` is None for a rank alone.
    """
    missing = values.isnan()  # which MPI's maximum passes over
    both = torch.stack([values.masked_fill(missing, -torch.inf), missing.double()])
    reduced = _reduce(comm, both, "MAX")
    return reduced[0].masked_fill(reduced[1] > 0, torch.nan)


def _reduce(comm: Intracomm | None, values: Tensor, operation: Literal["SUM", "MAX"]) -> Tensor:
    if comm is None or comm.size == 1:
        return values
    from mpi4py import MPI

    host = values.detach().cpu().contiguous()
    result = torch.empty_like(host)
    with EXCHANGING:
        comm.Allreduce(host.numpy(), result.numpy(), op=getattr(MPI, operation))
    return result.to(values.device)
