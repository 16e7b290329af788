"""Tensors of rank 0 for all ranks, as their bytes: nothing is unpickled."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["share_tensors"]

PIECE_BYTES = 1 << 30  # of a message: MPI counts to 2³¹ − 1


def share_tensors(tensors: Mapping[str, Tensor], comm: "MPI.Comm") -> dict[str, Tensor]:
    """Rank 0's tensors by their names, in the memory of each rank's host. Collective.

    Args:
        tensors: Tensors without gradients on the host; what other ranks give does not count.
    """
    kinds = {name: (str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()}
    shared: dict[str, Tensor] = {}
    for name, (dtype, shape) in json.loads(comm.bcast(json.dumps(kinds))).items():
        if comm.rank == 0:
            tensor = tensors[name].contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        cells = tensor.reshape(-1).view(torch.uint8).numpy()
        for start in range(0, cells.size, PIECE_BYTES):
            comm.Bcast(cells[start : start + PIECE_BYTES])
        shared[name] = tensor
    return shared
