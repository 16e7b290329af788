"""Gradient sums over NCCL or RCCL, whose groups are made from what MPI knows alone.

torch.distributed normally takes ranks, address and a port from the environment, where a batch
script's variables may lie or another job's port may be taken, and keeps one default group per
process. Here rank 0 listens on a port that the system picks, MPI tells it to the others, and the
groups are built without the registry: environment and default group stay the caller's.
"""

import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from tilenet.errors import TilenetError
from tilenet.mpi import Intracomm
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.devices import find_node_place
from tilenet.parallel.sums.own_streams import OwnStreams
from tilenet.parallel.sums.shares import block

CONNECT = timedelta(minutes=2)
SUM = timedelta(minutes=30)  # the slowest rank may be reading, or writing a checkpoint


class NcclTransport:
    """A process group of torch per device of a rank, each over all ranks.

    Args:
        comm: The ranks; duplicated.
        pieces: The tensors that will be summed; the ranks' first devices sum with one another,
            their second ones, and so on.

    Raises:
        AgreedError: The ranks cannot reach one another.
    """

    name = "nccl"

    def __init__(self, comm: Intracomm, pieces: Sequence[Tensor]) -> None:
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


def _open_store(comm: Intracomm) -> Any:
    """A key-value store that rank 0 serves. Collective."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    place = find_node_place(comm)
    one_node = all(comm.allgather(place.size == comm.size))
    store: Any = None
    host, port, fault = "", 0, ""
    if comm.rank == 0:
        # By name: on many systems a node's own name resolves to a loopback address there.
        host = "127.0.0.1" if one_node else socket.gethostname()
        try:
            # Port 0: the system picks a free one and holds it, so no other process can take it.
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
