"""Ranks that share out the optimizer's states make the weights that one rank makes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from left_by_runs import alone, check_close, on_first, weights
from mpi4py import MPI
from safetensors.torch import load_file
from test_same_as_whole_image import NETWORKS, run_file, scenes_of

from tilenet.library.whole_run import train
from tilenet.parallel.sums.shares import Shares
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.partition import partition_bytes
from tilenet.training.config.keys import GradientKeys, MeshKeys, NetworkKeys, OptimizerKeys, TileKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.step import Step, Update

pytestmark = pytest.mark.ranks(2, (3, 4))

SHARED = {"shard": "always"}
OPTIMIZERS = {
    "adamw": OptimizerKeys("adamw", 0.01, weight_decay=0.1, clip_norm=0.05, **SHARED),
    "momentum": OptimizerKeys("sgd", 0.05, momentum=0.9, nesterov=True, **SHARED),
    "nothing kept": OptimizerKeys("sgd", 0.05, weight_decay=0.01, clip_norm=0.1, **SHARED),
}
# Pieces of a value for each rank; such that parameters lie in several; one for all.
PIECES_MB = {"tiny": 1e-9, "small": 1e-3, "one": 4.0}
WAYS: dict[str, dict[str, Any]] = {
    "overlap": {"tiles": TileKeys(2, 3)},
    "exchange": {"halo_mode": "exchange"},
    "sweep": {"halo_mode": "sweep"},
    "swap": {"tiles": TileKeys(2, 3), "swap": "all"},
    "partitions": {"partitions": 2, "balance": [9, 30], "micro_batches": 2},
}


def a_run(comm: MPI.Intracomm, path: Path, keys: OptimizerKeys, **more: Any) -> RunFile:
    network = more.pop("network", NETWORKS["same-bilinear"])
    run = run_file(path, scenes_of(path, [(90, 121)], comm), network, **more)
    return replace(run, steps=4, optimizer=keys, checkpoint_every=2)


def unshared(run: RunFile, **changes: Any) -> RunFile:
    return replace(run, optimizer=replace(run.optimizer, shard="never"), **changes)


def check_states(run: RunFile, wanted: RunFile) -> None:
    """The same tensors in checkpoints, and close."""
    found, whole = (load_file(f"{one.output}/last/state.safetensors") for one in (run, wanted))
    assert {name: (t.shape, t.dtype) for name, t in found.items()} == {
        name: (t.shape, t.dtype) for name, t in whole.items()
    }
    for name, tensor in whole.items():
        most = max(float(tensor.abs().max()), 1e-30)
        assert float((found[name] - tensor).abs().max()) <= 1e-10 * most


@pytest.mark.parametrize("pieces", PIECES_MB)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_checkpoints_are_those_of_one_rank(
    comm: MPI.Intracomm, shared_path: Path, name: str, pieces: str
) -> None:
    keys = GradientKeys(piece_mb=PIECES_MB[pieces])
    run = a_run(comm, shared_path, OPTIMIZERS[name], gradients=keys, **WAYS["overlap"])
    wanted = alone(unshared(run), comm)
    assert train(run, comm=comm) == 0
    comm.Barrier()
    check_close(run, wanted)
    check_states(run, wanted)
