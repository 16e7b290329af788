"""Ranks that share out the optimizer's states make the weights that one rank makes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from left_by_runs import alone, check_close, on_first
from mpi4py import MPI
from safetensors.torch import load_file
from test_same_as_whole_image import NETWORKS, run_file, scenes_of

from tilenet.geometry.layers import Conv
from tilenet.library.whole_run import train
from tilenet.model.loss_scale import LossScale
from tilenet.model.network import build_network
from tilenet.parallel.sums.gradients import GradientSum
from tilenet.parallel.sums.shares import Shares
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.partition import partition_bytes
from tilenet.planning.memory.states import OPTIMIZER_STATES
from tilenet.training.config.keys import GradientKeys, OptimizerKeys, TileKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.learning_rate import LearningRate
from tilenet.training.network import RunNetwork
from tilenet.training.optimizer import make_optimizer
from tilenet.training.states import fill_optimizer, optimizer_tensors
from tilenet.training.step import Step
from tilenet.training.update import Update

pytestmark = pytest.mark.ranks(2, (3, 4))

SHARED = {"shard": "always"}
OPTIMIZERS = {
    "adamw": OptimizerKeys("adamw", 0.01, weight_decay=0.1, clip_norm=0.05, **SHARED),
    "momentum": OptimizerKeys("sgd", 0.05, momentum=0.9, nesterov=True, **SHARED),
    "nothing kept": OptimizerKeys("sgd", 0.05, weight_decay=0.01, clip_norm=0.1, **SHARED),
}
# Such that parameters lie in several pieces, and on several ranks; or one piece for all.
PIECES_MB = {"small": 2e-4, "one": 4.0}
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


@pytest.mark.parametrize("way", [name for name in WAYS if name != "overlap"])
def test_each_way_of_computing_shares_them_out(
    comm: MPI.Intracomm, shared_path: Path, way: str
) -> None:
    keys = GradientKeys(piece_mb=PIECES_MB["small"])
    run = a_run(comm, shared_path, OPTIMIZERS["adamw"], gradients=keys, **WAYS[way])
    wanted = alone(unshared(run), comm)
    assert train(run, comm=comm) == 0
    comm.Barrier()
    check_close(run, wanted)
    check_states(run, wanted)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_runs_go_on_whatever_was_shared(comm: MPI.Intracomm, shared_path: Path, name: str) -> None:
    """On one rank, on some, on all of them; with states shared out and not, by turns."""
    run = a_run(comm, shared_path, OPTIMIZERS[name], **WAYS["overlap"])
    run = replace(run, steps=5, checkpoint_every=1, gradients=GradientKeys(piece_mb=1e-3))
    wanted = alone(unshared(run), comm)
    assert train(replace(run, steps=1), comm=comm) == 0
    on_first(unshared(run, steps=2), comm, resume=True)
    two = comm.Split(comm.rank < 2)
    if comm.rank < 2:
        assert train(replace(run, steps=3), comm=two, resume=True) == 0
    comm.Barrier()
    two.Free()
    assert train(unshared(run, steps=4), comm=comm, resume=True) == 0
    comm.Barrier()
    assert train(replace(run, gradients=GradientKeys()), comm=comm, resume=True) == 0
    comm.Barrier()
    check_close(run, wanted)
    check_states(run, wanted)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rank_keeps_the_bytes_that_plans_count(
    comm: MPI.Intracomm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
) -> None:
    kept: list[int] = []
    networks: list[RunNetwork] = []
    close, made = Step.close, RunNetwork.__init__

    def counting(self: Step) -> None:
        states = self.update.optimizer.state.values()
        kept.append(sum(v.nbytes for one in states for k, v in one.items() if is_state(k, v)))
        close(self)

    def noting(self: RunNetwork, *arguments: Any) -> None:
        made(self, *arguments)
        networks.append(self)

    monkeypatch.setattr(Step, "close", counting)
    monkeypatch.setattr(RunNetwork, "__init__", noting)
    run = a_run(comm, shared_path, OPTIMIZERS[name], **WAYS["overlap"])
    assert train(run, comm=comm) == 0
    (network,) = networks
    said = capfd.readouterr().err
    if comm.rank == 0:
        share = f"each rank keeps {(network.shared_bytes or 0) / 2**20:.1f} MiB"
        assert (share in said) == (comm.size > 1)
    layers, balance = network.plan.record.layers, network.plan.balance
    (part,) = partition_bytes(
        layer_bytes(layers, 64, 64, "float64"), balance, 1, "never", run.optimizer.kind,
        sharers=network.sharers,
    )  # fmt: skip
    assert network.sharers == comm.size
    assert network.later_bytes == part.gradients + part.optimizer
    whole = sum(p.nbytes for p in network.network.parameters())
    assert comm.allreduce(kept[-1]) == OPTIMIZER_STATES[run.optimizer.kind] * whole
    # Planned in bytes, kept in values of 8, of each state.
    assert 0 <= max(comm.allgather(kept[-1])) - part.optimizer < 8 * 2


def is_state(key: str, value: object) -> bool:
    return isinstance(value, torch.Tensor) and key != "step"


def test_ranks_may_have_nothing_to_update(comm: MPI.Intracomm) -> None:
    """One weight for all ranks: its owner alone keeps something, and checkpoints hold it."""
    network = build_network((Conv(1, 1, kernel=1, bias=False),), dtype=torch.float64)
    (weight,) = network.trained
    shares = Shares([weight], comm, 4 << 20)
    gradients = GradientSum([weight], comm, shares)
    optimizer = make_optimizer(OptimizerKeys("adamw", 0.5), shares.own)
    update = Update(optimizer, LearningRate(0.5, 9), LossScale(), 1.0)
    first = float(weight.detach())
    for step in range(2):
        gradients.zero()
        gradients.arm()
        ((comm.rank + 1) * weight.sum()).backward()
        gradients.finish()
        update.apply(gradients, 1.0, step)
    gradients.close()
    assert float(weight.detach()) == pytest.approx(first - 1.0, rel=1e-6)  # AdamW's first steps
    assert comm.allgather(float(weight.detach())) == [float(weight.detach())] * comm.size
    found = optimizer_tensors(network, optimizer, shares)
    named = {"0.weight.step", "0.weight.exp_avg", "0.weight.exp_avg_sq"}
    assert set(found) == (named if comm.rank == 0 else set())
    assert comm.rank > 0 or float(found["0.weight.step"]) == 2.0


def test_weights_that_were_not_updated_yet_have_no_states(comm: MPI.Intracomm) -> None:
    """As after a module's weights were unfrozen between two runs, until the first update."""
    convs = Conv(1, 3, kernel=3), Conv(3, 2, kernel=1)
    network = build_network(convs, dtype=torch.float64)
    shares = Shares(network.trained, comm, 64)
    kept = {
        f"0.{name}.{key}": torch.rand_like(parameter)
        for name, parameter in network[0].named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
    }
    kept |= {f"0.{name}.step": torch.tensor(3.0) for name, _ in network[0].named_parameters()}
    kept = comm.bcast(kept)
    optimizer = make_optimizer(OptimizerKeys("adamw", 0.5), shares.own)
    fill_optimizer(network, optimizer, kept, "the test", shares)
    found = optimizer_tensors(network, optimizer, shares)
    wanted = kept if comm.rank == 0 else {}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
