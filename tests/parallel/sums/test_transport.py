"""Each transport sums what the ranks hold; which one is used follows from plain facts."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from tilenet.errors import AgreedError, TilenetError
from tilenet.parallel.sums import nccl as module
from tilenet.parallel.sums import transport_choice
from tilenet.parallel.sums.nccl import NcclTransport
from tilenet.parallel.sums.transport_choice import (
    RankFacts,
    arrives_from,
    choose_transport,
    exchange_from,
    rank_facts,
)
from tilenet.parallel.sums.transports import DeviceTransport, Transport, open_transport

pytestmark = pytest.mark.ranks(2)

SIZES = [1, 7, 1000, 65537, 3]
ON_CPU = ["host", "device", "group"]


def pieces_of(rank: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Views of one buffer, as gradients are."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    flat = torch.randn(sum(SIZES), generator=generator, dtype=torch.float64).to(dtype)
    return list(flat.split(SIZES))


def group_on_cpu(store: Any, rank: int, size: int) -> Any:
    """A group of torch that needs no GPU, where NCCL's would be."""
    return torch.distributed.ProcessGroupGloo(store, rank, size, module.CONNECT)


@pytest.fixture(autouse=True)
def groups_on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(module, "_nccl", group_on_cpu)


@contextmanager
def opened(name: str, comm: MPI.Intracomm, pieces: list[Tensor]) -> Iterator[Transport]:
    """A transport; `group`: NCCL's, with a group that sums on a CPU."""
    transport: Transport
    if name == "group":
        transport = NcclTransport(comm, pieces)
    else:
        transport = open_transport(name, comm, pieces)
    yield transport
    transport.close()


def check_sums(comm: MPI.Intracomm, transport: Transport, pieces: list[Tensor]) -> None:
    before = [np.array(comm.allgather(piece.cpu().double().numpy())) for piece in pieces]
    for piece in pieces:
        transport.sum(piece)
    places = 1e-6 if pieces[0].dtype == torch.float32 else 1e-14
    for piece, parts in zip(pieces, before, strict=True):
        found = piece.cpu().double().numpy()
        assert np.abs(found - parts.sum(axis=0)).max() <= places * np.abs(parts).sum(axis=0).max()
        assert np.array_equal(found, comm.bcast(found))  # to the bit, or weights drift apart


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", ON_CPU)
def test_sums(comm: MPI.Intracomm, name: str, dtype: torch.dtype) -> None:
    pieces = pieces_of(comm.rank, dtype)
    with opened(name, comm, pieces) as transport:
        check_sums(comm, transport, pieces)
        check_sums(comm, transport, pieces[::-1])  # sums of sums, in another order


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", ON_CPU)
def test_blocks_are_summed_and_gathered(comm: MPI.Intracomm, name: str, dtype: torch.dtype) -> None:
    sizes = [comm.size * number for number in (1, 7, 20001)]
    pieces = [torch.cat(pieces_of(comm.rank, dtype, seed))[:n] for seed, n in enumerate(sizes)]
    with opened(name, comm, pieces) as transport:
        check_blocks(comm, transport, pieces)


def check_blocks(comm: MPI.Intracomm, transport: Transport, pieces: list[Tensor]) -> None:
    """What a block's owner gets is the sum; gathered, all have what the owners got."""
    for piece in pieces:
        parts = np.array(comm.allgather(piece.cpu().double().numpy()))
        wanted = parts.sum(axis=0)
        places = 1e-6 if piece.dtype == torch.float32 else 1e-14
        most = places * np.abs(parts).sum(axis=0).max()
        transport.sum_own(piece)
        width = piece.numel() // comm.size
        mine = slice(comm.rank * width, (comm.rank + 1) * width)
        found = piece.cpu().double().numpy()
        assert np.abs(found - wanted)[mine].max() <= most
        own = found[mine].copy()
        transport.gather(piece)
        found = piece.cpu().double().numpy()
        assert np.array_equal(found, np.concatenate(comm.allgather(own)))


@pytest.mark.parametrize("name", ON_CPU)
def test_a_sum_is_its_own_adjoint(comm: MPI.Intracomm, name: str) -> None:
    """⟨Sx, y⟩ = ⟨x, Sy⟩, both taken over all ranks."""
    x, y = (torch.cat(pieces_of(comm.rank, torch.float64, seed)) for seed in (1, 2))
    summed_x, summed_y = x.clone(), y.clone()
    with opened(name, comm, [x]) as transport:
        transport.sum(summed_x)
        transport.sum(summed_y)
    left = comm.allreduce(float(summed_x @ y))
    right = comm.allreduce(float(x @ summed_y))
    assert left == pytest.approx(right, rel=1e-11)


def test_a_group_per_device(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' first devices sum with one another, and their second ones."""

    class Elsewhere(torch.Tensor):
        """A tensor on the CPU that says that it is on another device."""

        device = torch.device("cpu", 1)  # type: ignore[assignment]

    made: list[str] = []

    def counted(store, rank, size):  # type: ignore[no-untyped-def]
        made.append(str(rank))
        return group_on_cpu(store, rank, size)

    monkeypatch.setattr(module, "_nccl", counted)
    pieces = pieces_of(comm.rank, torch.float64)
    pieces[3:] = [piece.as_subclass(Elsewhere) for piece in pieces[3:]]
    transport = NcclTransport(comm, pieces)
    assert len(made) == 2
    assert len(transport._groups) == 2
    check_sums(comm, transport, pieces)
    transport.close()


def test_two_transports_at_once(comm: MPI.Intracomm) -> None:
    a, b = pieces_of(comm.rank, torch.float64, 1), pieces_of(comm.rank, torch.float64, 2)
    with opened("group", comm, a) as first, opened("group", comm, b) as second:
        check_sums(comm, first, a)
        check_sums(comm, second, b)
        check_sums(comm, first, a)


def test_a_group_leaves_environment_and_default_group_alone(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies = {"RANK": "7", "WORLD_SIZE": "99", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
    for name, value in lies.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    pieces = pieces_of(comm.rank, torch.float64)
    with opened("group", comm, pieces) as transport:
        check_sums(comm, transport, pieces)
        assert dict(os.environ) == before
        assert not torch.distributed.is_initialized()


def test_an_unreachable_rank_is_said_on_all(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.rank == comm.size - 1:

        def fails(*_: object) -> None:
            raise RuntimeError("connection refused\nby a long trace")

        monkeypatch.setattr(module, "_nccl", fails)
    else:
        monkeypatch.setattr(module, "CONNECT", timedelta(seconds=1))
    with pytest.raises(AgreedError, match=r"ranks of nccl must reach one another") as raised:
        NcclTransport(comm, pieces_of(comm.rank, torch.float64))
    assert str(raised.value) == comm.bcast(str(raised.value))


def test_a_slow_rank_may_take_longer_than_connecting(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT", timedelta(seconds=2))
    pieces = pieces_of(comm.rank, torch.float64)
    with opened("group", comm, pieces) as transport:
        if comm.rank == comm.size - 1:
            time.sleep(3)
        total = pieces[2].clone()
        transport.sum(total)
    wanted = np.sum(comm.allgather(pieces[2].numpy()), axis=0)
    assert np.abs(total.numpy() - wanted).max() <= 1e-13


def test_a_rank_that_never_comes_is_an_error(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SUM", timedelta(seconds=1))
    pieces = pieces_of(comm.rank, torch.float64)
    with opened("group", comm, pieces) as transport:
        if comm.rank < comm.size - 1:
            with pytest.raises(RuntimeError):
                transport.sum(pieces[0])


@pytest.mark.ranks(1, 2)
def test_auto_and_device_are_host_on_a_cpu(comm: MPI.Intracomm) -> None:
    for name in ("auto", "device"):
        with opened(name, comm, pieces_of(comm.rank, torch.float32)) as transport:
            assert transport.name == "host"


def test_device_sums_host_memory_too(comm: MPI.Intracomm) -> None:
    pieces = pieces_of(comm.rank, torch.float64)
    transport = DeviceTransport(comm)
    check_sums(comm, transport, pieces)
    transport.close()


def test_nccl_is_refused_on_a_cpu(comm: MPI.Intracomm) -> None:
    with pytest.raises(AgreedError, match=r"nccl sums gradients on GPUs only .*rank 0.*host$"):
        open_transport("nccl", comm, pieces_of(comm.rank, torch.float32))


def test_ranks_that_lay_out_otherwise_are_refused(comm: MPI.Intracomm) -> None:
    pieces = pieces_of(comm.rank, torch.float32)
    if comm.rank == comm.size - 1:
        pieces = pieces[:-1]
    said = rf"lay gradients out alike \(rank {comm.size - 1}: 4 pieces .*, rank 0: 5 "
    with pytest.raises(AgreedError, match=said):
        open_transport("host", comm, pieces)


def a_rank(*gpus: str, nccl: bool = True, mpi: bool | None = False, version: str = "") -> RankFacts:
    return RankFacts(gpus, has_nccl=nccl, device_mpi=mpi, mpi=version)


A, B = a_rank("a"), a_rank("b")
CPU, XPU = a_rank(), RankFacts(on_xpu=True, has_nccl=True, device_mpi=True)
CHOICES = [
    ("auto", [A, B], "nccl"),
    ("auto", [a_rank("a", "b"), a_rank("c", "d")], "nccl"),
    ("auto", [A, A], "host"),
    ("auto", [a_rank("a", "b"), a_rank("c", "b")], "host"),
    ("auto", [A, CPU], "host"),
    ("auto", [CPU, CPU], "host"),
    ("auto", [a_rank("a", mpi=True), a_rank("a", mpi=True)], "device"),
    ("auto", [a_rank("a", mpi=True, nccl=False), a_rank("b", mpi=True)], "device"),
    ("auto", [a_rank("a", mpi=True, nccl=False), a_rank("b", mpi=None)], "host"),
    ("auto", [a_rank("a", mpi=True), a_rank(mpi=True)], "host"),
    ("host", [A, B], "host"),
    ("nccl", [A, B], "nccl"),
    ("device", [CPU, CPU], "host"),
    ("device", [a_rank("a", mpi=None), a_rank("a", mpi=True)], "device"),
    ("auto", [XPU, XPU], "host"),
    ("auto", [A, XPU], "host"),
    ("host", [XPU, XPU], "host"),
]


@pytest.mark.ranks  # no rank is needed
@pytest.mark.parametrize(("name", "facts", "wanted"), CHOICES)
def test_choices(name: str, facts: list[RankFacts], wanted: str) -> None:
    assert choose_transport(name, facts) == wanted


CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.29"
REFUSALS = [
    ("nccl", [A, CPU], r"on GPUs only \(those of rank 1 are on a CPU\)"),
    ("nccl", [A, a_rank("b", nccl=False)], r"built into torch \(on rank 1 it is not\)"),
    ("nccl", [A, B, A], r"\(ranks 0 and 2 share a\)"),
    ("device", [a_rank("a", mpi=True), B], r"\(on rank 1 it does not: .*as its manual says"),
    ("device", [a_rank("a", version=CRAY)], "set MPICH_GPU_SUPPORT_ENABLED=1, or"),
    ("device", [a_rank("a", version="MPICH Version: 5.0.2")], "an MPICH configured --with-cuda"),
    ("device", [a_rank("a", version="Open MPI v5.0.11")], "an Open MPI configured --with-cuda"),
    ("device", [a_rank("a", version="IBM Spectrum MPI")], 'jsrun --smpiargs="-gpu"'),
    ("nccl", [A, XPU], r"\(gradients.transport: nccl, rank 1 has one\); use .*: host"),
    ("device", [XPU, XPU], r"\(gradients.transport: device, rank 0 has one\)"),
]


@pytest.mark.ranks  # no rank is needed
@pytest.mark.parametrize(("name", "facts", "said"), REFUSALS)
def test_refusals(name: str, facts: list[RankFacts], said: str) -> None:
    with pytest.raises(TilenetError, match=said):
        choose_transport(name, facts)


@pytest.mark.ranks  # no rank is needed
@pytest.mark.parametrize(("setting", "wanted"), [("1", True), ("0", False), (None, False)])
def test_cray_says_by_its_environment(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, wanted: bool
) -> None:
    monkeypatch.setattr(MPI, "Get_library_version", lambda: CRAY)
    monkeypatch.delenv("MPICH_GPU_SUPPORT_ENABLED", raising=False)
    if setting is not None:
        monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", setting)
    assert transport_choice.mpi_takes_device_memory() is wanted


class Himself:
    """Takes messages to himself and loses what is in them, or refuses."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.sent_bytes = error, 0

    def Sendrecv(self, sent: torch.Tensor, *_: object) -> None:
        self.sent_bytes += sent.nbytes
        if self.error is not None:
            raise self.error


@pytest.mark.ranks  # no rank is needed
@pytest.mark.parametrize("error", [None, MPI.Exception(MPI.ERR_BUFFER)])
def test_what_mpi_says_of_device_memory_is_tried(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Memory of the CPU stands for that of a device."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert arrives_from(cpu)
    monkeypatch.setattr(MPI, "COMM_SELF", himself := Himself(error))
    assert not arrives_from(cpu)
    assert himself.sent_bytes == 1024
    monkeypatch.setattr(transport_choice, "arrives_from", lambda device: device == cpu)
    monkeypatch.setattr(transport_choice, "mpi_takes_device_memory", lambda: True)
    assert exchange_from("auto", [gpu], MPI.COMM_WORLD) == "host"
    with pytest.raises(AgreedError, match="on rank 0 it does not: "):
        exchange_from("device", [gpu], MPI.COMM_WORLD)
    monkeypatch.setattr(transport_choice, "arrives_from", lambda device: device == gpu)
    assert exchange_from("auto", [gpu], MPI.COMM_WORLD) == "device"


@pytest.mark.ranks  # no rank is needed
def test_halos_of_intels_gpus_go_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_choice, "mpi_takes_device_memory", lambda: True)
    xpu = torch.device("xpu", 0)
    assert {exchange_from(way, [xpu], MPI.COMM_WORLD) for way in ("auto", "host")} == {"host"}
    with pytest.raises(AgreedError, match=r"\(exchange_from: device, rank 0 has one\)"):
        exchange_from("device", [xpu], MPI.COMM_WORLD)


@pytest.mark.ranks  # no rank is needed
def test_this_mpi_is_asked() -> None:
    """The wheels of MPICH and Open MPI are built without CUDA, and say so."""
    facts = rank_facts([torch.zeros(3)])
    assert facts.device_mpi is not True
    assert facts.gpus == ()
    assert facts.mpi
    assert facts.mpi in " ".join(MPI.Get_library_version().split())


@pytest.mark.ranks(1, 2)
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nccl", "host", "device", "auto"])
def test_sums_on_gpus(comm: MPI.Intracomm, name: str) -> None:
    if torch.cuda.device_count() < comm.size:
        pytest.skip(f"{comm.size} ranks need as many GPUs, torch sees {torch.cuda.device_count()}")
    if name == "device" and not comm.allreduce(
        bool(transport_choice.mpi_takes_device_memory()), op=MPI.LAND
    ):
        pytest.skip("this MPI takes no device memory")
    device = torch.device("cuda", comm.rank)
    flat = torch.cat(pieces_of(comm.rank, torch.float32)).to(device)
    pieces = list(flat.split(SIZES))
    torch.cuda.synchronize(device)
    with opened(name, comm, pieces) as transport:
        assert transport.name == ("nccl" if name == "auto" else name)
        for _ in range(3):
            check_sums(comm, transport, pieces)
        whole = [piece[: piece.numel() // comm.size * comm.size] for piece in pieces]
        check_blocks(comm, transport, [piece for piece in whole if piece.numel()])


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_cannot_use_nccl(comm: MPI.Intracomm) -> None:
    if torch.cuda.device_count() == 0:
        pytest.skip("needs a GPU")
    pieces = [piece.cuda(0) for piece in pieces_of(comm.rank, torch.float32)]
    with pytest.raises(AgreedError, match=r"ranks 0 and 1 share GPU"):
        open_transport("nccl", comm, pieces)
    with opened("auto", comm, pieces) as transport:
        assert transport.name in ("host", "device")
        check_sums(comm, transport, pieces)
