"""When the watchdog wakes; that it ends the job is in tests/test_ranks_that_fail.py."""

import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI
from test_same_as_whole_image import NETWORKS, run_file
from whole_image import random_scene

from tilenet.errors import TilenetError
from tilenet.parallel.watchdog import SLOW, Watchdog
from tilenet.predict import Prediction, predict
from tilenet.run_file import TileKeys
from tilenet.train import train


@pytest.fixture
def barks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What it would have said, for it does not end the tests."""
    heard: list[str] = []

    def bark(watchdog: Watchdog) -> None:
        heard.append(watchdog._words())
        watchdog.arm("nothing", 1e6)

    monkeypatch.setattr(Watchdog, "_bark", bark)
    return heard


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "watchdog"]


def test_it_wakes_when_nothing_happens(barks: list[str]) -> None:
    with Watchdog(0.2, "rank 3 of 4") as watchdog:
        watchdog.arm("step 7")
        time.sleep(1.5)
    assert len(barks) == 1
    assert "[rank 3 of 4] tilenet: step 7 must end within 0.2 s;" in barks[0]


def test_signs_of_life_move_the_deadline(barks: list[str]) -> None:
    with Watchdog(0.5) as watchdog:
        for step in range(12):
            watchdog.arm(f"step {step}")
            time.sleep(0.1)
        assert barks == []
        watchdog.arm("a checkpoint", 100)
        time.sleep(1.0)
    assert barks == []


def test_it_sleeps_until_it_is_armed_and_after_its_block(barks: list[str]) -> None:
    with Watchdog(0.1) as watchdog:
        time.sleep(0.4)
        watchdog.arm("step 1")
    time.sleep(0.4)
    assert (barks, threads()) == ([], [])
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_0_switches_it_off(barks: list[str]) -> None:
    with Watchdog(0) as watchdog:
        watchdog.arm("step 1")
        assert threads() == []
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_what_is_no_patience_is_refused(seconds: float) -> None:
    with pytest.raises(TilenetError, match="hang_seconds must lie between"):
        Watchdog(seconds)


def test_training_and_prediction_arm_it_around_all_that_may_hang(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    armed: list[tuple[str, float]] = []

    def arm(watchdog: Watchdog, doing: str, times: float = 1.0) -> None:
        assert watchdog.who == f"rank {comm.rank} of {comm.size}"
        assert watchdog.hang_seconds == 1234
        armed.append((doing, times))

    monkeypatch.setattr(Watchdog, "arm", arm)
    scene = random_scene(shared_path, (97, 130), 1, write=comm.rank == 0)
    comm.Barrier()
    keys: Any = {"tiles": TileKeys(2, 3), "hang_seconds": 1234, "checkpoint_every": 2}
    run = replace(run_file(shared_path, [scene], NETWORKS["same-nearest"], **keys), steps=3)
    assert train(run, comm=comm) == 0
    assert armed == [
        ("step 1", SLOW),
        ("step 2", 1.0),
        ("the checkpoint of step 2", SLOW),
        ("step 3", 1.0),
        ("the checkpoint of step 3", SLOW),
    ]
    armed.clear()
    out = str(shared_path / "map.tif")
    done = predict(Prediction(run.output, scene.image, out, tile_px=40, hang_seconds=1234), comm)
    tiles = done["grid"][0] * done["grid"][1]
    assert armed == [
        (f"the round of tile {start}", 1.0 if start else SLOW)
        for start in range(0, tiles, comm.size)
    ]
    assert len(armed) > 1
