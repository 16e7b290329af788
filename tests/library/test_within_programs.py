"""Programs with settings, threads and messages of their own get what others get."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from scenes import KEYS, Net
from torch import nn

import tilenet


def pixels() -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).normal(size=(2, 61, 83))


def trained(**more: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return tilenet.train(Net(), **KEYS, **more).weights()


@pytest.mark.parametrize(
    "settings", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")]
)
def test_settings_of_a_program_change_no_result(
    scene: Path, settings: Callable[[], AbstractContextManager[Any]]
) -> None:
    net = Net()
    wanted, map_before = trained(output="plain"), tilenet.predict(net, pixels())
    module = Net()
    module.load_state_dict(net.state_dict())
    torch.manual_seed(2)
    begins = Net()
    with settings():
        found = tilenet.train(begins, **KEYS, output="set").weights()
        map_within = tilenet.predict(module, pixels())
        px = tilenet.halo(module).px
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert np.array_equal(map_within, map_before)
    assert px == tilenet.halo(net).px


@pytest.mark.parametrize("begin", [lambda: trained(output="torchrun"), tilenet.Job])
def test_processes_of_torchrun_do_not_train_alone(
    scene: Path, monkeypatch: pytest.MonkeyPatch, begin: Callable[[], object]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    begin()  # one process
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(tilenet.TilenetError, match=r"torchrun does not start \(WORLD_SIZE: 3"):
        begin()


def test_autocast_of_a_program_is_not_recorded() -> None:
    parts = nn.Conv2d(3, 4, 3), nn.SiLU(), nn.MaxPool2d(2), nn.ConvTranspose2d(4, 2, 2, 2)
    net = nn.Sequential(nn.ReflectionPad2d(1), *parts)
    with torch.autocast("cpu", torch.bfloat16):
        within = tilenet.adopt(net, 3)
    assert within.layers == tilenet.adopt(net, 3).layers


def test_gradients_that_a_callback_switches_off_are_there_in_the_next_step(scene: Path) -> None:
    wanted = trained(output="plain")
    try:
        found = trained(output="off", on_step=lambda row: torch.set_grad_enabled(False))
    finally:
        torch.set_grad_enabled(True)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_threads_train_and_adopt(scene: Path) -> None:
    nets = [Net(classes=number + 2) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        weights = pool.submit(trained, output="thread").result()
        found = list(pool.map(lambda net: tilenet.adopt(net, 2).context.halo_px, nets))
    assert found == [tilenet.adopt(nets[0], 2).context.halo_px] * 4
    assert all(torch.equal(weights[name], value) for name, value in trained(output="b").items())


def test_a_run_stays_where_it_was_begun(scene: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tilenet.train(Net(), **KEYS, output="run")
    (scene / "other").mkdir()
    monkeypatch.chdir(scene / "other")
    assert len(run.history["step"]) == 3
    gone = tilenet.Run("run")
    assert "not there" in repr(gone)
    with pytest.raises(tilenet.TilenetError, match="read from its folder"):
        _ = gone.history


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (torch.ones(2, 9, 9, requires_grad=True), "requires grad"),
        (np.ones((9, 9)), r"shape: \(9, 9\)"),
        (np.array([["a"]]), "dtype: <U1"),
    ],
)
def test_what_is_no_image_is_said(image: Any, words: str) -> None:
    with pytest.raises(tilenet.TilenetError, match=words):
        tilenet.predict(Net(), image)


def test_long_doubles_are_taken(scene: Path) -> None:
    net = Net()
    wanted = tilenet.predict(net, pixels())
    assert np.array_equal(tilenet.predict(net, pixels().astype(np.longdouble)), wanted)


@pytest.mark.ranks(2)
def test_messages_of_a_program_are_its_own() -> None:
    """One was taken for a piece of the map before."""
    comm, net = MPI.COMM_WORLD, Net()
    net.load_state_dict(comm.bcast(net.state_dict()))
    wanted = tilenet.predict(net, pixels(), tile_px=16)  # of many tiles, so that ranks send some
    sent = comm.isend({"hello": 42}, dest=0) if comm.rank == 1 else None
    comm.Barrier()
    found = tilenet.predict(net, pixels(), tile_px=16)
    if sent is None:
        assert comm.recv(source=1) == {"hello": 42}
    else:
        sent.wait()
    assert np.array_equal(found, wanted)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["numbers", "masks"])
def test_arrays_that_differ_between_ranks_are_refused(what: str) -> None:
    rank, image = MPI.COMM_WORLD.rank, np.ma.masked_array(pixels(), np.zeros((2, 61, 83), bool))
    image[1, 33, 7 + rank] = np.ma.masked if what == "masks" else 0.5
    with pytest.raises(tilenet.TilenetError, match=r"ask for the same .* an array"):
        tilenet.predict(Net(), image)
