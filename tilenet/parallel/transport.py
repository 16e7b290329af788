"""How a piece of gradients is summed over ranks: through host memory, with MPI."""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Transport", "open_transport"]


class Transport(Protocol):
    """Sums one-dimensional tensors over ranks, in place; called from one thread."""

    def sum(self, part: Tensor) -> None:
        """Replace `part` by its sum over the ranks. Collective."""

    def close(self) -> None:
        """Give everything back. Collective."""


class HostTransport:
    """MPI on host memory; pieces on a device are staged through pinned memory.

    Args:
        comm: Is duplicated, so that its messages meet nobody else's.
        pieces: What will be summed.
    """

    def __init__(self, comm: "MPI.Intracomm", pieces: list[Tensor]) -> None:
        self._comm = comm.Dup()
        self._host = torch.empty(0)
        staged = [piece.numel() for piece in pieces if piece.is_cuda]
        if staged:
            self._host = torch.empty(max(staged), dtype=pieces[0].dtype, pin_memory=True)

    def sum(self, part: Tensor) -> None:
        from mpi4py import MPI

        host = self._host[: part.numel()].copy_(part) if part.is_cuda else part
        self._comm.Allreduce(MPI.IN_PLACE, host.numpy())
        if part.is_cuda:
            part.copy_(host)

    def close(self) -> None:
        self._comm.Free()


def open_transport(name: str, comm: "MPI.Intracomm", pieces: list[Tensor]) -> Transport:
    """The transport of that name. Collective."""
    assert name in ("auto", "host"), name
    return HostTransport(comm, pieces)
