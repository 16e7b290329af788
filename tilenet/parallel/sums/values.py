"""Sums of a step over ranks: losses of a whole image, through which gradients flow, and statistics.

By itself torch blends each tile into the running statistics of batch norm as it passes, so the last
tile weighs most and each rank ends with its own. Here a step's tiles weigh alike and all ranks end
with the same, whatever rank computed which tile (`norm_scope: tile`).
"""

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from tilenet.model.modules import BatchNorm
from tilenet.parallel.health.progress import EXCHANGING

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["RunningStatistics", "add_over", "global_sum", "largest_over"]


def global_sum(x: Tensor, comm: "MPI.Intracomm | None") -> Tensor:
    """The sum of `x` over the ranks, on each of them. Collective, in forward and in backward.

    It is its own adjoint: gradients of each rank's copy of the sum flow back to all. So ranks that
    compute one loss from it alike must each take their share of that loss, 1 / `comm.size`.

    Args:
        x: float64, wants a gradient on all ranks or on none.
    """
    total: Tensor = _GlobalSum.apply(x, comm)  # type: ignore[no-untyped-call]
    return total


class _GlobalSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: "MPI.Intracomm | None") -> Tensor:
        ctx.comm = comm
        return add_over(comm, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return add_over(ctx.comm, grads[0]), None


def add_over(comm: "MPI.Intracomm | None", values: Tensor) -> Tensor:
    """The sum of float64 values over ranks. Collective; `comm` is None for a rank alone."""
    return _reduced(comm, values, "SUM")


def largest_over(comm: "MPI.Intracomm | None", values: Tensor) -> Tensor:
    """The largest of float64 values over ranks. Collective; `comm` is None for a rank alone."""
    return _reduced(comm, values, "MAX")


def _reduced(
    comm: "MPI.Intracomm | None", values: Tensor, operation: Literal["SUM", "MAX"]
) -> Tensor:
    if comm is None or comm.size == 1:
        return values
    from mpi4py import MPI

    host = values.detach().cpu().contiguous()
    result = torch.empty_like(host)
    with EXCHANGING:
        comm.Allreduce(host.numpy(), result.numpy(), op=getattr(MPI, operation))
    return result.to(values.device)


MOMENTUM = 0.1


class RunningStatistics:
    """The running statistics of a network's batch norms; does nothing where there are none."""

    def __init__(self, network: nn.Module, comm: "MPI.Intracomm") -> None:
        self._comm = comm
        self._norms = [m for m in network.modules() if isinstance(m, BatchNorm)]
        self._before: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        """Begin a step."""
        self._before = [(_of(n.running_mean), _of(n.running_var)) for n in self._norms]
        for norm in self._norms:
            norm.reset_running_stats()
            norm.tiles = 0  # a plain average over the tiles seen from now on

    def finish(self) -> None:
        """Blend the step's tiles, of all ranks, into the running statistics. Collective."""
        if not self._norms:
            return
        tiles = self._norms[0].tiles or 0
        parts = [part for n in self._norms for part in (n.running_mean, n.running_var)]
        sums = torch.cat([_of(part).double().cpu() for part in parts]) * tiles
        total = np.append(sums.numpy(), float(tiles))
        self._comm.Allreduce(np.copy(total), total)
        blend = MOMENTUM if total[-1] else 0.0
        means = torch.from_numpy(total[:-1] / max(total[-1], 1.0))
        start = 0
        for norm, before in zip(self._norms, self._before, strict=True):
            for buffer, old in zip((norm.running_mean, norm.running_var), before, strict=True):
                assert buffer is not None
                new = means[start : start + buffer.numel()].to(buffer)
                buffer.copy_((1 - blend) * old + blend * new)
                start += buffer.numel()


def _of(buffer: Tensor | None) -> Tensor:
    assert buffer is not None, "batch norms are built with running statistics"
    return buffer.clone()
