"""Checkpoints of loops of one's own: of which maps are made, and with which loops go on."""

from pathlib import Path

import torch

from tilenet.library.local_network import LocalNetwork
from tilenet.model.network import load_weights
from tilenet.storage.checkpoints import find_checkpoint, load_json, load_tensors, save_checkpoint
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.states import fill_optimizer, optimizer_tensors

__all__ = ["load", "save"]


def save(
    folder: Path,
    step: int,
    local: LocalNetwork,
    record: NetworkRecord,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Write a checkpoint as the folder's `last`.

    Raises:
        TilenetError: The folder cannot be written.
    """
    state = {} if optimizer is None else optimizer_tensors(local.network, optimizer)
    weights, said = local.module_state(), record.to_json()
    save_checkpoint(folder, step, weights, said, state, {"step": step})


def load(
    folder: Path, local: LocalNetwork, optimizer: torch.optim.Optimizer | None
) -> tuple[int, NetworkRecord]:
    """Fill in the weights, and what the optimizer keeps; the steps made, and the record.

    Raises:
        TilenetError: There is no such checkpoint, or it is of another network or optimizer.
    """
    found = find_checkpoint(folder)
    weights, names = load_tensors(found / "weights.safetensors"), local.adopted.names
    load_weights(local.network, weights, str(found), names)
    if optimizer is not None:
        state = load_tensors(found / "state.safetensors")
        fill_optimizer(local.network, optimizer, state, str(found))
    record = NetworkRecord.from_json(load_json(found / "network.json"))
    return int(load_json(found / "progress.json")["step"]), record
