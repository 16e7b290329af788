"""Gradient sums over NCCL, RCCL or gloo, whose groups are made from what MPI knows alone.

torch.distributed normally takes ranks, address and a port from the environment, where a batch
script's variables may lie or another job's port may be taken, and keeps one default group per
process. Here rank 0 listens on a port that the system picks, MPI tells it to the others, and the
groups are built without the registry: environment and default group stay the caller's.
"""

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilenet.errors import TilenetError
from tilenet.parallel.mesh import agreed, node_place
from tilenet.parallel.own_streams import OwnStreams

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["GroupTransport"]

CONNECT = timedelta(minutes=2)
SUM = timedelta(minutes=30)  # the slowest rank may be reading, or writing a checkpoint


class GroupTransport:
    """A process group of torch per device of a rank, each over all ranks.

    Args:
        name: `nccl` or `gloo`.
        comm: Is duplicated.
        pieces: What will be summed; the ranks' first devices sum with one another, their second
            ones, and so on.

    Raises:
        AgreedError: The ranks cannot reach one another.
    """

    def __init__(self, name: str, comm: "MPI.Intracomm", pieces: Sequence[Tensor]) -> None:
        self.name = name
        self._comm = comm.Dup()
        self._groups: dict[torch.device, Any] = {}
        self._streams = OwnStreams()
        self._store = _open_store(self._comm, name)
        with agreed(self._comm):
            try:
                for piece in pieces:
                    if piece.device not in self._groups:
                        self._open_group(piece)
            except RuntimeError as error:
                raise TilenetError(_unreachable(name, str(error))) from error

    def _open_group(self, piece: Tensor) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        store = PrefixStore(f"device {len(self._groups)}", self._store)
        make = _nccl if self.name == "nccl" else _gloo
        self._groups[piece.device] = make(store, self._comm.rank, self._comm.size)
        # NCCL connects on first use: better here, where a failure has a sentence, and soon.
        self.sum(torch.zeros(1, dtype=piece.dtype, device=piece.device))
        self._groups[piece.device]._set_default_timeout(SUM)

    def sum(self, part: Tensor) -> None:
        group = self._groups[part.device]
        if not part.is_cuda:
            group.allreduce([part]).wait()
            return
        with self._streams.of(part.device):
            group.allreduce([part]).wait()  # only makes the stream wait

    def close(self) -> None:
        for group in self._groups.values():
            # torch 2.3's groups have `_shutdown` (NCCL) or end with their last reference (gloo)
            end = getattr(group, "shutdown", None) or getattr(group, "_shutdown", None)
            if end is not None:
                end()
        self._groups.clear()
        # The groups' own threads look into the store until they end: rank 0 leaves it last.
        self._comm.Barrier()
        del self._store
        self._comm.Free()


def _open_store(comm: "MPI.Intracomm", name: str) -> Any:
    """A key-value store that rank 0 serves. Collective."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    place = node_place(comm)
    one_node = comm.allreduce(int(place.size == comm.size)) == comm.size
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
            raise TilenetError(_unreachable(name, fault))
        if store is None:
            try:
                store = TCPStore(host, port, is_master=False, timeout=CONNECT)
            except (RuntimeError, OSError) as error:
                raise TilenetError(
                    _unreachable(name, f"rank {comm.rank}, {host}:{port}: {error}")
                ) from error
    return store


def _nccl(store: Any, rank: int, size: int) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = CONNECT
    return ProcessGroupNCCL(store, rank, size, options)


def _gloo(store: Any, rank: int, size: int) -> Any:
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, size, CONNECT)


def _unreachable(name: str, fault: str) -> str:
    reason = fault.partition("\n")[0].strip()
    return (
        f"the ranks of {name} must reach one another by TCP ({reason}); set GLOO_SOCKET_IFNAME or "
        "NCCL_SOCKET_IFNAME to the network between the nodes, or use gradients.transport: host"
    )
