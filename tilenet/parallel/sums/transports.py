"""How a piece of gradients is summed over ranks: the door, and MPI on host and on device memory.

Gradient sums over NCCL or RCCL, whose groups are made from what MPI knows alone.

torch.distributed normally takes ranks, address and a port from the environment, where a batch
script's variables may lie or another job's port may be taken, and keeps one default group per
process. Here rank 0 listens on a port that the system picks, MPI tells it to the others, and the
groups are built without the registry: environment and default group stay the caller's.

Streams of the helper thread that sums gradients.

On a device's default stream its copies and sums would wait for all of backward that the main thread
has queued there meanwhile, and nothing would overlap.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from tilenet.errors import AgreedError, TilenetError
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.devices import node_place
from tilenet.parallel.sums.transport_choice import choose_transport, rank_facts

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "DeviceTransport",
    "HostTransport",
    "NcclTransport",
    "OwnStreams",
    "Transport",
    "open_transport",
]


class OwnStreams:
    """One stream per device, next to the one that backward fills."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def of(self, device: torch.device) -> Iterator[None]:
        """Queue the block's work on the device's own stream, and wait for it at the end.

        Waits on the host, because what follows runs in another thread and on another stream.
        """
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        with torch.cuda.stream(stream):  # makes the device this thread's, too
            yield
        stream.synchronize()


CONNECT = timedelta(minutes=2)
SUM = timedelta(minutes=30)  # the slowest rank may be reading, or writing a checkpoint


class NcclTransport:
    """A process group of torch per device of a rank, each over all ranks.

    Args:
        comm: Is duplicated.
        pieces: What will be summed; the ranks' first devices sum with one another, their second
            ones, and so on.

    Raises:
        AgreedError: The ranks cannot reach one another.
    """

    def __init__(self, comm: "MPI.Intracomm", pieces: Sequence[Tensor]) -> None:
        self.name = "nccl"
        self._comm = comm.Dup()
        self._groups: dict[torch.device, Any] = {}
        self._streams = OwnStreams()
        self._store = _open_store(self._comm)
        with agreed(self._comm):
            try:
                for piece in pieces:
                    if piece.device not in self._groups:
                        self._open_group(piece)
            except RuntimeError as error:
                raise TilenetError(_unreachable(str(error))) from error

    def _open_group(self, piece: Tensor) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        store = PrefixStore(f"device {len(self._groups)}", self._store)
        self._groups[piece.device] = _nccl(store, self._comm.rank, self._comm.size)
        # NCCL connects on first use: better here, where a failure has a sentence, and soon.
        self.sum(torch.zeros(1, dtype=piece.dtype, device=piece.device))
        self._groups[piece.device]._set_default_timeout(SUM)

    def sum(self, part: Tensor) -> None:
        with self._stream(part):
            self._groups[part.device].allreduce([part]).wait()  # only makes the stream wait

    def sum_own(self, part: Tensor) -> None:
        own = block(part, self._comm)
        with self._stream(part):
            total = torch.empty_like(own)
            self._groups[part.device]._reduce_scatter_base(total, part).wait()
            own.copy_(total)

    def gather(self, part: Tensor) -> None:
        with self._stream(part):
            own = block(part, self._comm).clone()
            self._groups[part.device]._allgather_base(part, own).wait()

    def _stream(self, part: Tensor) -> AbstractContextManager[None]:
        return self._streams.of(part.device) if part.is_cuda else nullcontext()

    def close(self) -> None:
        for group in self._groups.values():
            end = getattr(group, "shutdown", None)  # gloo's have none
            if end is not None:
                end()
        self._groups.clear()
        # The groups' own threads look into the store until they end: rank 0 leaves it last.
        self._comm.Barrier()
        del self._store
        self._comm.Free()


def _open_store(comm: "MPI.Intracomm") -> Any:
    """A key-value store that rank 0 serves. Collective."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    place = node_place(comm)
    one_node = all(comm.allgather(place.size == comm.size))
    store: Any = None
    host, port, fault = "", 0, ""
    if comm.rank == 0:
        # By name: on many systems a node's own name resolves to a loopback address there.
        host = "127.0.0.1" if one_node else socket.gethostname()
        try:
            # Port 0: the system picks one that is free and holds it, nobody can come in between.
            store = TCPStore(host, 0, is_master=True, timeout=CONNECT, wait_for_workers=False)
            port = store.port
        except (RuntimeError, OSError) as error:
            fault = str(error)
    host, port, fault = comm.bcast((host, port, fault), root=0)
    with agreed(comm):
        if fault:
            raise TilenetError(_unreachable(fault))
        if store is None:
            try:
                store = TCPStore(host, port, is_master=False, timeout=CONNECT)
            except (RuntimeError, OSError) as error:
                raise TilenetError(
                    _unreachable(f"rank {comm.rank}, {host}:{port}: {error}")
                ) from error
    return store


def _nccl(store: Any, rank: int, size: int) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = CONNECT
    return ProcessGroupNCCL(store, rank, size, options)


def _unreachable(fault: str) -> str:
    reason = fault.partition("\n")[0].strip()
    return (
        f"the ranks of nccl must reach one another by TCP ({reason}); set NCCL_SOCKET_IFNAME to "
        "the network between the nodes, or use gradients.transport: host"
    )


class Transport(Protocol):
    """Sums one-dimensional tensors over ranks, in place; called from one thread.

    Attributes:
        name: What was chosen: `host`, `device` or `nccl`.
    """

    name: str

    def sum(self, part: Tensor) -> None:
        """Replace `part` by its sum over the ranks; on return the sum is there. Collective.

        What writes `part` must be done before.
        """

    def sum_own(self, part: Tensor) -> None:
        """Replace this rank's `block` of `part` by its sum; what is elsewhere is lost. Collective.

        `part` is one that as many ranks cut into equal blocks, here and in `gather`.
        """

    def gather(self, part: Tensor) -> None:
        """Replace each rank's `block` of `part` by what that rank has there. Collective."""

    def close(self) -> None:
        """Give everything back. Collective."""


def block(part: Tensor, comm: "MPI.Intracomm") -> Tensor:
    """What of a part of equal blocks is this rank's."""
    return part.chunk(comm.size)[comm.rank]


class _MpiTransport:
    """Messages of MPI, in memory that a subclass chooses.

    Args:
        comm: Is duplicated, so that its messages meet nobody else's.
    """

    def __init__(self, comm: "MPI.Intracomm") -> None:
        self._comm = comm.Dup()
        self._streams = OwnStreams()

    def sum(self, part: Tensor) -> None:
        from mpi4py import MPI

        with self._reached(part) as there:
            self._comm.Allreduce(MPI.IN_PLACE, _buffer(there))

    def sum_own(self, part: Tensor) -> None:
        with self._reached(part) as there:
            own = block(there, self._comm)
            total = torch.empty_like(own)  # in place, MPI would leave it in the first block
            self._comm.Reduce_scatter_block(_buffer(there), _buffer(total))
            own.copy_(total)

    def gather(self, part: Tensor) -> None:
        from mpi4py import MPI

        with self._reached(part) as there:
            self._comm.Allgather(MPI.IN_PLACE, _buffer(there))

    def _reached(self, part: Tensor) -> AbstractContextManager[Tensor]:
        """The part's values where MPI reads and writes them."""
        raise NotImplementedError

    def close(self) -> None:
        self._comm.Free()


def _buffer(values: Tensor) -> Any:
    return values if values.is_cuda else values.numpy()


class HostTransport(_MpiTransport):
    """MPI on host memory; pieces on a device are staged through pinned memory.

    Args:
        comm: Is duplicated, so that its messages meet nobody else's.
        pieces: What will be summed.
    """

    def __init__(self, comm: "MPI.Intracomm", pieces: Sequence[Tensor]) -> None:
        super().__init__(comm)
        self.name = "host"
        self._host = torch.empty(0)
        staged = [piece.numel() for piece in pieces if piece.is_cuda]
        if staged:
            self._host = torch.empty(max(staged), dtype=pieces[0].dtype, pin_memory=True)

    @contextmanager
    def _reached(self, part: Tensor) -> Iterator[Tensor]:
        if not part.is_cuda:
            yield part
            return
        host = self._host[: part.numel()]
        with self._streams.of(part.device):
            host.copy_(part)
        yield host
        with self._streams.of(part.device):
            part.copy_(host)


class DeviceTransport(_MpiTransport):
    """A CUDA-aware MPI on device memory.

    Args:
        comm: Is duplicated, so that its messages meet nobody else's.
    """

    def __init__(self, comm: "MPI.Intracomm") -> None:
        super().__init__(comm)
        self.name = "device"

    @contextmanager
    def _reached(self, part: Tensor) -> Iterator[Tensor]:
        # MPI copies on this thread's device.
        with self._streams.of(part.device) if part.is_cuda else nullcontext():
            yield part


def open_transport(name: str, comm: "MPI.Intracomm", pieces: Sequence[Tensor]) -> Transport:
    """The transport of that name; its `name` says which one `auto` became. Collective.

    Args:
        name: `auto`, `host`, `device` or `nccl`; the same on all ranks.
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
    return NcclTransport(comm, pieces)


def _check_alike(comm: "MPI.Intracomm", pieces: Sequence[Tensor]) -> None:
    """Ranks that cut otherwise would add wrong numbers to one another, or wait forever."""
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
