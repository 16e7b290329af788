"""How a piece of gradients is summed over ranks: the door, and MPI on host and on device memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from tilenet.errors import AgreedError, TilenetError
from tilenet.parallel.mesh import agreed
from tilenet.parallel.own_streams import OwnStreams
from tilenet.parallel.process_groups import GroupTransport
from tilenet.parallel.transport_choice import choose_transport, rank_facts

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["DeviceTransport", "HostTransport", "Transport", "open_transport"]


class Transport(Protocol):
    """Sums one-dimensional tensors over ranks, in place; called from one thread.

    Attributes:
        name: What was chosen: `host`, `device`, `nccl` or `gloo`.
    """

    name: str

    def sum(self, part: Tensor) -> None:
        """Replace `part` by its sum over the ranks; on return the sum is there. Collective.

        What writes `part` must be done before.
        """

    def close(self) -> None:
        """Give everything back. Collective."""


class HostTransport:
    """MPI on host memory; pieces on a device are staged through pinned memory.

    Args:
        comm: Is duplicated, so that its messages meet nobody else's.
        pieces: What will be summed.
    """

    def __init__(self, comm: "MPI.Intracomm", pieces: Sequence[Tensor]) -> None:
        self.name = "host"
        self._comm = comm.Dup()
        self._streams = OwnStreams()
        self._host = torch.empty(0)
        staged = [piece.numel() for piece in pieces if piece.is_cuda]
        if staged:
            self._host = torch.empty(max(staged), dtype=pieces[0].dtype, pin_memory=True)

    def sum(self, part: Tensor) -> None:
        from mpi4py import MPI

        if not part.is_cuda:
            self._comm.Allreduce(MPI.IN_PLACE, part.numpy())
            return
        host = self._host[: part.numel()]
        with self._streams.of(part.device):
            host.copy_(part)
        self._comm.Allreduce(MPI.IN_PLACE, host.numpy())
        with self._streams.of(part.device):
            part.copy_(host)

    def close(self) -> None:
        self._comm.Free()


class DeviceTransport:
    """A CUDA-aware MPI on device memory.

    Args:
        comm: Is duplicated, so that its messages meet nobody else's.
    """

    def __init__(self, comm: "MPI.Intracomm") -> None:
        self.name = "device"
        self._comm = comm.Dup()

    def sum(self, part: Tensor) -> None:
        from mpi4py import MPI

        if not part.is_cuda:
            self._comm.Allreduce(MPI.IN_PLACE, part.numpy())
            return
        with torch.cuda.device(part.device):  # MPI copies on this thread's device
            self._comm.Allreduce(MPI.IN_PLACE, part)

    def close(self) -> None:
        self._comm.Free()


def open_transport(name: str, comm: "MPI.Intracomm", pieces: Sequence[Tensor]) -> Transport:
    """The transport of that name; its `name` says which one `auto` became. Collective.

    Args:
        name: `auto`, `host`, `device`, `nccl` or `gloo`; the same on all ranks.
        comm: The ranks that sum.
        pieces: What will be summed: as many of the same sizes on each rank.

    Raises:
        AgreedError: On all ranks: it does not fit their devices, or cannot be set up.
    """
    _check_alike(comm, pieces)
    facts = comm.allgather(rank_facts(pieces))
    try:
        chosen = choose_transport(name, facts)  # all ranks know all facts, and conclude alike
    except TilenetError as error:
        raise AgreedError(str(error)) from error
    if chosen == "host":
        return HostTransport(comm, pieces)
    if chosen == "device":
        return DeviceTransport(comm)
    return GroupTransport(chosen, comm, pieces)


def _check_alike(comm: "MPI.Intracomm", pieces: Sequence[Tensor]) -> None:
    """Ranks that cut otherwise would add wrong numbers to one another, or wait for ever."""
    devices = list(dict.fromkeys(piece.device for piece in pieces))
    layout = [(p.numel(), str(p.dtype), devices.index(p.device)) for p in pieces]
    first = comm.bcast(layout, root=0)
    with agreed(comm):
        if layout != first:
            raise TilenetError(
                f"ranks must lay gradients out alike (rank {comm.rank}: {len(pieces)} pieces on "
                f"{len(devices)} devices, rank 0: {len(first)} on "
                f"{len({device for *_, device in first})}); name as many different devices on "
                "each rank"
            )
