"""Checkpoints of user-written loops, for maps and for continuing the loop."""

from pathlib import Path

import torch

from tilenet.errors import TilenetError
from tilenet.library.local_network import LocalNetwork
from tilenet.model.network import load_weights
from tilenet.storage.checkpoints import (
    FILES,
    Checkpoint,
    find_checkpoint,
    load_json,
    load_tensors,
    save_checkpoint,
)
from tilenet.storage.checksums import wrong_file
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.states import fill_optimizer, optimizer_tensors

OPTIMIZER = "optimizer"  # in progress.json: the class whose states are saved


def save(
    folder: Path,
    step: int,
    local: LocalNetwork,
    record: NetworkRecord,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Write a checkpoint, which becomes the folder's `last`.

    Args:
        step: Number of steps done.
        optimizer: None: its states are not saved.

    Raises:
        TilenetError: The folder cannot be written.
    """
    state = {} if optimizer is None else optimizer_tensors(local.network, optimizer)
    progress = {OPTIMIZER: None if optimizer is None else type(optimizer).__name__}
    content = Checkpoint(local.module_state(), record.to_json(), state, progress)
    save_checkpoint(folder, step, content)


def load(
    folder: Path, local: LocalNetwork, optimizer: torch.optim.Optimizer | None, *, check: bool
) -> tuple[int, NetworkRecord]:
    """Load the weights and the optimizer's states; return the number of steps done and the record.

    Args:
        folder: A checkpoint, or a folder with a link `last` to it.
        optimizer: Optimizer that gets its states; None: no states are loaded.
        check: Whether all files are compared with their checksums: one rank's work.

    Raises:
        TilenetError: There is no such checkpoint, or it belongs to another network or optimizer.
    """
    checkpoint = find_checkpoint(folder)
    if check and (wrong := wrong_file(checkpoint, FILES)):
        raise TilenetError(
            f"a loop goes on from a whole checkpoint ({checkpoint}: {wrong}); load another one"
        )
    weights = load_tensors(checkpoint / "weights.safetensors")
    load_weights(local.network, weights, str(checkpoint), local.adopted.names)
    progress = load_json(checkpoint / "progress.json")
    if optimizer is not None:
        own = type(optimizer).__name__
        if (saved := progress.get(OPTIMIZER, own)) != own:  # older checkpoints do not say
            raise TilenetError(
                f"an optimizer goes on with the states of one of its kind ({checkpoint}: "
                f"{saved or 'saved without an optimizer'}, here: {own}); load without an optimizer "
                "to begin with fresh states"
            )
        optimizer.state.clear()
        state = load_tensors(checkpoint / "state.safetensors")
        fill_optimizer(local.network, optimizer, state, str(checkpoint))
    record = NetworkRecord.from_json(load_json(checkpoint / "network.json"))
    return int(progress["step"]), record
