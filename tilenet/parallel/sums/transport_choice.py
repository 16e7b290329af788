"""Which transport sums the gradients: decided from plain facts that all ranks know of all ranks."""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tilenet.errors import AgreedError, TilenetError
from tilenet.mpi import Intracomm
from tilenet.parallel.ranks.devices import list_gpus

# How to make an MPI CUDA-aware, by what its version line contains; the first that fits.
SWITCHES = {
    "CRAY MPICH": "set MPICH_GPU_SUPPORT_ENABLED=1",
    "Spectrum": 'start with jsrun --smpiargs="-gpu"',
    "MVAPICH": "set MV2_USE_CUDA=1",
    "MPICH": "use an MPICH configured --with-cuda",
    "Open MPI": "use an Open MPI configured --with-cuda",
}


@dataclass(frozen=True)
class RankFacts:
    """The facts about one rank on which the choice depends.

    Attributes:
        gpus: Names, unique over all nodes, of the CUDA devices that hold gradients; or empty.
        on_xpu: Whether they are on Intel's, from which no transport but `host` takes them.
        has_nccl: Whether torch can use NCCL, or RCCL.
        device_mpi: Whether MPI takes device memory, which was tried; None if it does not say.
        mpi: The first line of MPI's version.
    """

    gpus: tuple[str, ...] = ()
    on_xpu: bool = False
    has_nccl: bool = False
    device_mpi: bool | None = None
    mpi: str = ""


def choose_transport(name: str, facts: Sequence[RankFacts]) -> str:
    """The transport for the option `name`: `host`, `device` or `nccl`.

    Args:
        facts: Facts of all ranks, by rank. All ranks conclude the same from them.

    Raises:
        TilenetError: The transport does not fit the facts.
    """
    if name not in ("auto", "host"):
        _refuse_xpu("gradients.transport", name, [rank.on_xpu for rank in facts])
    if name == "auto":
        if not _nccl_fault(facts):
            return "nccl"
        on_gpus = all(rank.gpus for rank in facts)
        return "device" if on_gpus and all(rank.device_mpi for rank in facts) else "host"
    if name == "nccl" and (fault := _nccl_fault(facts)):
        raise TilenetError(fault)
    if name == "device":
        if not any(rank.gpus for rank in facts):
            return "host"
        for number, rank in enumerate(facts):
            if rank.device_mpi is False:
                raise TilenetError(
                    "gradients.transport: device needs an MPI that takes device memory (on rank "
                    f"{number} it does not: {rank.mpi}); {_switch(rank.mpi)}, or use nccl or host"
                )
    return name


def _nccl_fault(facts: Sequence[RankFacts]) -> str:
    """Why NCCL cannot sum; empty where it can."""
    owners: dict[str, int] = {}
    for number, rank in enumerate(facts):
        if not rank.gpus:
            return (
                f"nccl sums gradients on GPUs only (those of rank {number} are on a CPU); use "
                "gradients.transport: host"
            )
        if not rank.has_nccl:
            return (
                f"nccl must be built into torch (on rank {number} it is not); use "
                "gradients.transport: host"
            )
        for gpu in rank.gpus:
            if owners.setdefault(gpu, number) != number:
                return (
                    f"nccl needs a GPU of its own for each rank (ranks {owners[gpu]} and {number} "
                    f"share {gpu}); start fewer ranks per node, or use gradients.transport: host"
                )
    return ""


def _refuse_xpu(key: str, value: str, on_xpu: list[bool]) -> None:
    if any(on_xpu):
        raise AgreedError(
            f"from devices of type xpu ranks send through host memory ({key}: {value}, rank "
            f"{on_xpu.index(True)} has one); use {key}: host"
        )


def _switch(mpi: str) -> str:
    for mark, switch in SWITCHES.items():
        if mark.lower() in mpi.lower():
            return switch
    return "switch that on as its manual says"


def exchange_from(
    memory: str, devices: Sequence[torch.device], comm: Intracomm
) -> Literal["host", "device"]:
    """The memory from which halos of feature maps are sent: `host` or `device`. Collective.

    Args:
        memory: `auto`, `host` or `device`.
        devices: Devices of this rank.

    Raises:
        AgreedError: `device` was asked for, and MPI does not take its memory.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    own_fact = _takes_memory_of(gpus) if gpus else None
    facts = comm.allgather((devices[0].type, own_fact))
    kinds = [kind for kind, _ in facts]
    if memory == "device":
        _refuse_xpu("exchange_from", memory, [kind == "xpu" for kind in kinds])
    if memory == "host" or "cuda" not in kinds:
        return "host"
    refusing = [rank for rank, (_, takes) in enumerate(facts) if takes is False]
    if memory == "device" and refusing:
        from mpi4py import MPI

        mpi = _mpi_version(MPI.Get_library_version())
        raise AgreedError(
            f"exchange_from: device needs an MPI that takes device memory (on rank {refusing[0]} "
            f"it does not: {mpi}); {_switch(mpi)}, or use exchange_from: host"
        )
    if memory == "device" or all(takes for _, takes in facts):
        return "device"
    return "host"


def rank_facts(pieces: Sequence[Tensor]) -> RankFacts:
    """The facts of this rank."""
    from mpi4py import MPI

    distributed = torch.distributed.is_available()
    devices = dict.fromkeys(piece.device for piece in pieces if piece.device.type == "cuda")
    names = list_gpus() if devices else ()  # to look at GPUs starts CUDA
    return RankFacts(
        gpus=tuple(
            f"GPU {names[device.index or 0]} of {MPI.Get_processor_name()}" for device in devices
        ),
        on_xpu=any(piece.device.type == "xpu" for piece in pieces),
        has_nccl=distributed and torch.distributed.is_nccl_available(),
        device_mpi=_takes_memory_of(list(devices)),
        mpi=_mpi_version(MPI.Get_library_version()),
    )


def _mpi_version(version: str) -> str:
    return " ".join(version.partition("\n")[0].replace("\0", "").split())


TRIED_BYTES = 1024


def _takes_memory_of(gpus: Sequence[torch.device]) -> bool | None:
    """As `mpi_takes_device_memory`, and confirmed by a message."""
    says = mpi_takes_device_memory()
    return arrives_from(gpus[0]) if says and gpus else says


def arrives_from(device: torch.device) -> bool:
    """Whether a message of device memory from this rank to itself arrives as it was sent."""
    from mpi4py import MPI

    sent = torch.arange(TRIED_BYTES // 4, dtype=torch.float32, device=device)
    received = torch.zeros_like(sent)
    torch.get_device_module(device).synchronize(device)  # MPI knows of no streams
    try:
        MPI.COMM_SELF.Sendrecv(sent, 0, 0, received, 0)
    except MPI.Exception:
        return False
    return torch.equal(sent, received)


def mpi_takes_device_memory() -> bool | None:
    """Whether this rank's MPI says that it takes device memory; None if it does not say."""
    from mpi4py import MPI

    if "CRAY MPICH" in MPI.Get_library_version():
        return os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"
    # An extension of MPI that mpi4py does not bind; found through the module that links MPI.
    names = ("rocm", "hip") if torch.version.hip else ("cuda",)
    try:
        library = ctypes.CDLL(MPI.__file__)
    except OSError:
        return None
    for name in names:
        query = getattr(library, f"MPIX_Query_{name}_support", None)
        if query is not None:
            return bool(query())
    return None
