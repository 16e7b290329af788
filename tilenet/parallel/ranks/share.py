"""Broadcasts of rank 0's tensors, as their bytes: nothing is unpickled."""

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from tilenet.mpi import Comm

PIECE_BYTES = 1 << 30  # MPI counts the bytes of a message to 2³¹ − 1


def share_tensors(tensors: Mapping[str, Tensor], comm: Comm) -> dict[str, Tensor]:
    """Rank 0's tensors by their names, in the memory of each rank's host. Collective.

    Args:
        tensors: Tensors without gradients on the host; ignored on other ranks.
    """
    kinds = {name: (str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()}
    shared: dict[str, Tensor] = {}
    for name, (dtype, shape) in json.loads(comm.bcast(json.dumps(kinds))).items():
        if comm.rank == 0:
            tensor = tensors[name].contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        for start in range(0, data.size, PIECE_BYTES):
            comm.Bcast(data[start : start + PIECE_BYTES])
        shared[name] = tensor
    return shared
