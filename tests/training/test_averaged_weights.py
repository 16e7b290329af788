"""Averages of weights: those of a plain loop, kept, gone on with, validated and mapped."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from left_by_runs import check_bits, farthest, on_first, same_tensors, weights, whole
from mpi4py import MPI
from safetensors.torch import load_file
from test_same_as_whole_image import LR, SEED, options_of, run_file, scenes_of
from validated_runs import a_run, check_row, table, wanted_row
from whole_recipe import train_whole

from tilenet.errors import AgreedError, TilenetError
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.library.whole_run import train
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.partition import block_bytes, partition_bytes
from tilenet.training.config.keys import NetworkKeys, OptimizerKeys, TileKeys
from tilenet.training.config.run_file import RunFile

pytestmark = pytest.mark.ranks(1, 2)

EMA, STEPS = 0.6, 4
NETWORK = NetworkKeys(poolings=2, base=4, convolutions=1)


def state(run: RunFile) -> dict[str, torch.Tensor]:
    return load_file(Path(run.output) / "last" / "state.safetensors")


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("partitions", [1, 3])
def test_the_average_is_that_of_a_plain_loop(
    comm: MPI.Intracomm, shared_path: Path, partitions: int
) -> None:
    scenes = scenes_of(shared_path, [(61, 90)], comm)
    made = [
        train_whole(scenes, options_of(NETWORK), steps, LR, SEED).weights
        for steps in range(STEPS + 1)
    ]
    mean = made[0]
    for one in made[1:]:
        mean = {name: EMA * old + (1 - EMA) * one[name] for name, old in mean.items()}
    pipeline: dict[str, Any] = {"partitions": partitions, "micro_batches": 2}
    run = run_file(
        shared_path, scenes, NETWORK, tiles=TileKeys(4, 2), **pipeline if partitions > 1 else {}
    )
    optimizer = OptimizerKeys("sgd", LR, ema=EMA)
    assert train(replace(run, steps=STEPS, optimizer=optimizer), comm=comm) == 0
    assert farthest(weights(run), mean) <= 1e-12
    assert farthest(state(run), {f"{name}.trained": one for name, one in made[-1].items()}) <= 1e-12


@pytest.mark.parametrize("shard", ["never", "always"])
def test_a_run_goes_on_with_both(comm: MPI.Intracomm, shared_path: Path, shard: Any) -> None:
    """On as many ranks to the last bit, on one rank to rounding; ranks may share out states."""
    scenes = scenes_of(shared_path, [(61, 90)], comm)
    keys = replace(NETWORK, norm="batch", norm_scope="image")
    optimizer = OptimizerKeys("adamw", 0.01, ema=0.9, shard=shard)
    run = run_file(shared_path, scenes, keys, tiles=TileKeys(2, 2))
    run = replace(run, steps=5, optimizer=optimizer, checkpoint_every=2)
    wanted = whole(run, comm)
    assert train(replace(run, steps=3), comm=comm) == 0
    assert train(run, resume=True, comm=comm) == 0
    check_bits(run, wanted)
    assert same_tensors(state(run), state(wanted))
    comm.Barrier()
    assert train(replace(run, steps=3), overwrite=True, comm=comm) == 0
    on_first(run, comm, resume=True)
    assert farthest(weights(run), weights(wanted)) <= 1e-10


def test_validation_best_and_maps_have_the_average(comm: MPI.Intracomm, shared_path: Path) -> None:
    run, held = a_run(comm, shared_path, NETWORK)
    run = replace(run, steps=3, optimizer=OptimizerKeys("sgd", 0.2, ema=EMA))
    assert train(run, comm=comm) == 0
    for name in ("last", "best"):
        folder = (Path(run.output) / name).resolve()
        (row,) = [one for one in table(run) if int(one["step"]) == int(folder.name[5:])]
        check_row(row, wanted_row(folder, held, comm))


def test_an_average_is_neither_dropped_nor_begun_in_between(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    scenes = scenes_of(shared_path, [(40, 41)], comm)
    run = replace(run_file(shared_path, scenes, NETWORK), steps=1)
    averaged = replace(run, steps=2, optimizer=OptimizerKeys("sgd", LR, ema=EMA))
    assert train(run, comm=comm) == 0
    with pytest.raises(AgreedError, match=r"goes on as it began \(ema .*: None, .*: 0.6\)"):
        train(averaged, resume=True, comm=comm)


@pytest.mark.ranks(1)
def test_other_weights_may_be_fixed_when_a_run_goes_on(
    comm: MPI.Intracomm, shared_path: Path
) -> None:
    """Freed ones begin at the checkpoint's, and fixed ones stay at their averages."""
    scenes = scenes_of(shared_path, [(40, 41)], comm)
    run = replace(run_file(shared_path, scenes, NETWORK), classes=4)
    run = replace(run, optimizer=OptimizerKeys("adamw", LR, ema=EMA))
    found: list[dict[str, torch.Tensor]] = []
    for fixed, steps in (("stem", 2), ("head", 3)):
        options = {"name": "residual", "drops": False, "fixed": [fixed]}
        keys = NetworkKeys(module="zoo:network", options=options)
        run = replace(run, network=keys, steps=steps)
        assert train(run, resume=True, comm=comm) == 0
        found.append(weights(run))
    first, second = found
    parts = {name.split(".")[0] for name in first}
    assert {"stem", "head"} < parts
    trained = state(run)
    assert all(torch.equal(second[name], first[name]) for name in first if "head" in name)
    assert not [name for name in trained if name.startswith("20.")]
    weight = trained["0.weight.trained"]
    mean = EMA * first["stem.0.weight"] + (1 - EMA) * weight
    assert not torch.equal(weight, first["stem.0.weight"])
    assert torch.allclose(second["stem.0.weight"], mean, rtol=1e-12, atol=0)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("ema", [0.0, 1.0, -0.5])
def test_it_decays(ema: float) -> None:
    with pytest.raises(TilenetError, match="between 0 and 1"):
        OptimizerKeys(ema=ema).check()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_plans_count_it_whole_on_each_rank(kind: str) -> None:
    costs = layer_bytes(unet_layers(UNetOptions(poolings=2, base=4)), 64, 64, "float32")
    weights = sum(cost.parameters for cost in costs)
    for sharers in (1, 3):
        job = costs, (len(costs),), 1, "never"
        plain, averaged = (
            partition_bytes(*job, optimizer, sharers=sharers)[0]
            for optimizer in (kind, f"{kind}+ema")
        )
        assert averaged.optimizer - plain.optimizer == weights
        blocks = block_bytes(costs, 1, "never", f"{kind}+ema", sharers=sharers)
        assert blocks[0, -1] == averaged.total
    assert OptimizerKeys("sgd", momentum=0.9, ema=0.9).kind == "sgd-momentum+ema"
