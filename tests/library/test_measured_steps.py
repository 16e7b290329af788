"""Steps that are measured, tile by tile or strip by strip, are those of one rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from scenes import Net
from test_own_loops import SEEN, sums
from torch import nn
from zoo import Pyramid, block

import tilenet
from tilenet.adoption.adopt import Adopted
from tilenet.geometry.sweep import Sweeps, strip_edges
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.library.network import network_keys
from tilenet.library.run import Run
from tilenet.library.whole_run import train
from tilenet.model.network import build_network
from tilenet.planning.memory.sweeps.trained_sweeps import maps_to_keep
from tilenet.training import swept
from tilenet.training.config.read import read_keys

RATE = 0.03
UNET = {"poolings": 2, "base": 4}
CROPS = {"crop_px": 64, "batch_size": 4}


@pytest.fixture(autouse=True)
def low_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        swept,
        "plan_sweeps",
        lambda layers, height, width, *_: Sweeps(
            strip_edges(height, 40), maps_to_keep(layers, height, width)
        ),
    )


def unet() -> Adopted:
    layers = unet_layers(UNetOptions(**UNET, bands=2, classes=3))
    state = build_network(layers, SEEN["seed"], torch.float64).state_dict()
    return Adopted("unet", layers, {name: name for name in state}, 2, 3, state)


def averaging() -> nn.Module:
    """Averages of the whole image, in several bins."""
    torch.manual_seed(7)
    net = Pyramid()
    net.stem = block(2, 8, stride=2)
    return net.double()


def normalised() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(block(2, 6), nn.Conv2d(6, 3, 3, padding=1)).double()


def alone(net: Any, batch_norm: str, more: dict[str, Any]) -> Run:
    """A run on this rank by itself, of tiles that overlap."""
    module = net if isinstance(net, nn.Module) else None
    network = UNET if module is None else {**network_keys(net, {}), "batch_norm": batch_norm}
    keys = {**SEEN, **more, "classes": 3, "network": network, "precision": "float64"}
    keys |= {"output": f"alone-{MPI.COMM_WORLD.rank}", "optimizer": {"name": "sgd", "lr": RATE}}
    run = read_keys(keys)
    train(run, comm=MPI.COMM_SELF, module=module)
    return Run(run.output)


CASES: dict[str, tuple[Callable[[], Any], Any, Any, dict[str, Any]]] = {
    "a U-Net, swept": (unet, "sweep", "frozen", {}),
    "crops, swept": (unet, "sweep", "frozen", CROPS),
    "averages, swept": (averaging, "sweep", "frozen", {}),
    "averages over tiles": (averaging, "overlap", "frozen", {"tiles": {"rows": 4, "columns": 2}}),
    "averages over ranks": (averaging, "exchange", "frozen", {}),
    "batch norm of crops": (normalised, "overlap", "step", CROPS),
}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("case", CASES)
def test_a_measured_step_is_that_of_one_rank(scene: Path, case: str) -> None:
    make, mode, batch_norm, more = CASES[case]
    wanted = alone(make(), batch_norm, {name: of for name, of in more.items() if name != "tiles"})
    job = tilenet.Job()
    local = job.split(make(), halo_mode=mode, batch_norm=batch_norm)
    first = {name: one.clone() for name, one in local.module_state().items()}
    optimizer, losses = torch.optim.SGD(local.parameters(), RATE), []
    for step in job.steps(**SEEN, **more):
        step.measure(sums)
        losses.append(step.apply(optimizer))
    assert losses == pytest.approx(list(wanted.history["loss"]), rel=1e-12)
    ours, theirs = local.module_state(), wanted.weights()
    changes = {name: one - first[name] for name, one in theirs.items()}
    most = max(float(one.abs().max()) for one in changes.values())
    assert most > 1e-3
    for name, change in changes.items():
        assert float((ours[name] - first[name] - change).abs().max()) <= 1e-10 * most, name


@pytest.mark.parametrize("mode", ["overlap", "sweep"])
def test_what_is_measured_is_a_sum_with_a_weight_and_once(scene: Path, mode: Any) -> None:
    job = tilenet.Job()
    job.split(Net(), halo_mode=mode)
    wrong: list[tuple[Any, str]] = [
        (lambda y, _: (y.mean(), 1), "found: a mean"),
        (lambda y, _: (y.sum(1), 1), "one number, the sum"),
        (lambda y, _: y.sum(), "weight: None"),
        (lambda y, _: (y.sum(), float("nan")), "finite number from 0 on"),
    ]
    for measured, sentence in wrong:
        steps = job.steps(**SEEN, prove=False)
        step = next(steps)
        with pytest.raises(tilenet.TilenetError, match=sentence):
            step.measure(measured)
        steps.close()
    steps = job.steps(**SEEN, prove=False)
    step = next(steps)
    step.measure(sums)
    with pytest.raises(tilenet.TilenetError, match="computed once"):
        step.measure(sums)
    steps.close()


@pytest.mark.parametrize("case", ["a U-Net, swept", "averages over tiles", "batch norm of crops"])
def test_tiles_that_are_computed_together_are_not_handed_out(scene: Path, case: str) -> None:
    make, mode, batch_norm, more = CASES[case]
    job = tilenet.Job()
    job.split(make(), halo_mode=mode, batch_norm=batch_norm)
    with pytest.raises(tilenet.TilenetError, match=r"measured .*call step\.measure"):
        next(iter(next(job.steps(**SEEN, **more, prove=False))))
