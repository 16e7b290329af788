"""How a piece of gradients is summed over ranks: the door, and MPI on host and on device memory."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from tilenet.errors import AgreedError, TilenetError
from tilenet.mpi import Intracomm
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.sums.nccl import NcclTransport
from tilenet.parallel.sums.own_streams import OwnStreams
from tilenet.parallel.sums.shares import block
from tilenet.parallel.sums.transport_choice import choose_transport, rank_facts


class Transport(Protocol):
    """Sums one-dimensional tensors over ranks, in place; called from one thread.

    Attributes:
        name: The chosen transport: `host`, `device` or `nccl`.
    """

    name: str

    def sum(self, part: Tensor) -> None:
        """Replace `part` by its sum over the ranks; on return the sum is there. Collective.

        All writes to `part` must have ended before.
        """

    def sum_own(self, part: Tensor) -> None:
        """Replace this rank's `block` of `part` by its sum; all else is lost. Collective.

        `part` is one that as many ranks cut into equal blocks, here and in `gather`.
        """

    def gather(self, part: Tensor) -> None:
        """Replace each rank's `block` of `part` by that rank's values. Collective."""

    def close(self) -> None:
        """Give everything back. Collective."""


class _MpiTransport:
    """Messages of MPI, in memory that a subclass chooses.

    Args:
        comm: The ranks; duplicated, so that messages do not meet others.
    """

    def __init__(self, comm: Intracomm) -> None:
        self._comm = comm.Dup()
        self._streams = OwnStreams()

    def sum(self, part: Tensor) -> None:
        from mpi4py import MPI

        with self._reached(part) as reachable:
            self._comm.Allreduce(MPI.IN_PLACE, _buffer(reachable))

    def sum_own(self, part: Tensor) -> None:
        with self._reached(part) as reachable:
            own = block(reachable, self._comm)
            total = torch.empty_like(own)  # in place, MPI would leave it in the first block
            self._comm.Reduce_scatter_block(_buffer(reachable), _buffer(total))
            own.copy_(total)

    def gather(self, part: Tensor) -> None:
        from mpi4py import MPI

        with self._reached(part) as reachable:
            self._comm.Allgather(MPI.IN_PLACE, _buffer(reachable))

    def _reached(self, part: Tensor) -> AbstractContextManager[Tensor]:
        """The part's values where MPI reads and writes them."""
        raise NotImplementedError

    def close(self) -> None:
        self._comm.Free()


def _buffer(values: Tensor) -> Any:
    return values if values.is_cuda else values.numpy()


class HostTransport(_MpiTransport):
    """MPI on host memory; pieces on a device are staged through pinned memory."""

    name = "host"

    def __init__(self, comm: Intracomm, pieces: Sequence[Tensor]) -> None:
        super().__init__(comm)
        self._host = torch.empty(0)
        staged = [piece.numel() for piece in pieces if piece.device.type != "cpu"]
        if staged:
            self._host = torch.empty(max(staged), dtype=pieces[0].dtype, pin_memory=True)

    @contextmanager
    def _reached(self, part: Tensor) -> Iterator[Tensor]:
        if part.device.type == "cpu":
            yield part
            return
        host = self._host[: part.numel()]
        with self._streams.of(part.device):
            host.copy_(part)
        yield host
        with self._streams.of(part.device):
            part.copy_(host)


class DeviceTransport(_MpiTransport):
    """A CUDA-aware MPI on device memory."""

    name = "device"

    @contextmanager
    def _reached(self, part: Tensor) -> Iterator[Tensor]:
        # MPI copies on this thread's device.
        with self._streams.of(part.device) if part.is_cuda else nullcontext():
            yield part


def open_transport(name: str, comm: Intracomm, pieces: Sequence[Tensor]) -> Transport:
    """The transport of that name; its `name` says which one `auto` became. Collective.

    Args:
        name: `auto`, `host`, `device` or `nccl`; the same on all ranks.
        comm: The ranks that sum.
        pieces: The tensors that will be summed: as many of the same sizes on each rank.

    Raises:
        AgreedError: On all ranks, if it does not fit their devices or cannot be set up.
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
    return NcclTransport(comm, pieces)


def _check_alike(comm: Intracomm, pieces: Sequence[Tensor]) -> None:
    """Refuse ranks that cut otherwise: they would add wrong numbers, or wait forever."""
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
