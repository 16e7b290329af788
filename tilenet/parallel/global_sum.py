"""Sums over ranks that gradients flow through: for losses of a whole image."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilenet.parallel.exchange_clock import EXCHANGING

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["global_sum"]


def global_sum(x: Tensor, comm: "MPI.Intracomm") -> Tensor:
    """The sum of `x` over the ranks, on each of them. Collective, in forward and in backward.

    Its adjoint is itself: what each rank makes of the sum flows back to all. So ranks that compute
    one loss from it alike must each take their share of that loss, 1 / `comm.size`.

    Args:
        x: float64, wants a gradient on all ranks or on none.
    """
    total: Tensor = _GlobalSum.apply(x, comm)  # type: ignore[no-untyped-call]
    return total


class _GlobalSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: "MPI.Intracomm") -> Tensor:
        ctx.comm = comm
        return _summed(x, comm)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.comm), None


def _summed(x: Tensor, comm: "MPI.Intracomm") -> Tensor:
    host = x.detach().cpu().contiguous()
    total = torch.empty_like(host)
    with EXCHANGING:
        comm.Allreduce(host.numpy(), total.numpy())
    return total.to(x.device)
