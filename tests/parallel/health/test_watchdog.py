"""When the watchdog wakes; that it ends the job is in tests/jobs/slurm/test_slurm_failures.py."""

import faulthandler
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI
from test_same_as_whole_image import NETWORKS, run_file, scenes_of

from tilenet.errors import TilenetError
from tilenet.library.whole_run import train
from tilenet.mapping.predict import predict
from tilenet.mapping.prediction import Prediction
from tilenet.parallel.health import watchdog as module
from tilenet.parallel.health.watchdog import SLOW, Watchdog
from tilenet.training.config.keys import TileKeys


@pytest.fixture
def said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """What was said until a text was; no watchdog ends the tests, for its grace is long."""
    monkeypatch.setattr(module, "GRACE_SECONDS", 1e6)
    heard: list[str] = []

    def until(text: str) -> str:
        limit = time.monotonic() + 60
        while text not in "".join(heard) and time.monotonic() < limit:
            heard.append(capfd.readouterr().err)
            time.sleep(0.02)
        return "".join(heard)

    return until


def test_it_wakes_when_nothing_happens(said: Callable[[str], str]) -> None:
    with Watchdog(0.2, "rank 3 of 4") as watchdog:
        watchdog.arm("step 7")
        text = said("<module>")
    first, *stacks = text.splitlines()[1:]
    assert first.startswith("[rank 3 of 4] tilenet: step 7 must end within 0.2 s;")
    assert all(line.startswith("[rank 3 of 4] ") for line in stacks)
    assert "in test_it_wakes_when_nothing_happens" in text


def test_signs_of_life_move_the_deadline(capfd: pytest.CaptureFixture[str]) -> None:
    with Watchdog(1.0) as watchdog:
        for step in range(12):
            watchdog.arm(f"step {step}")
            time.sleep(0.1)
        watchdog.arm("a checkpoint", 100)
        time.sleep(1.2)
    assert capfd.readouterr().err == ""


def test_parts_of_a_share_that_move_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    armed: list[tuple[str, float]] = []
    monkeypatch.setattr(Watchdog, "arm", lambda _, doing, times=1.0: armed.append((doing, times)))
    watchdog = Watchdog(1)
    clock = [7.0, 7.0009, 7.0011, 7.0012, 7.0013, 7.0022]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    for part in range(len(clock)):
        watchdog.arm_part("the survey", part, 6)
        del clock[0]
    watchdog.arm_others("the survey", 2.5)
    assert armed == [
        ("the survey, part 1 of 6", SLOW),
        ("the survey, part 3 of 6", 1.0),  # within a thousandth of the patience nothing is armed
        ("the survey, part 6 of 6", 1.0),
        ("the survey on other ranks", SLOW + 2.5),
    ]


def test_it_sleeps_until_it_is_armed_and_after_its_block(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Watchdog(0.3) as watchdog:
        time.sleep(0.6)
        watchdog.arm("step 1")
    watchdog.arm("step 2")
    time.sleep(0.6)
    assert capfd.readouterr().err == ""


def test_the_timer_that_needs_no_interpreter_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
        monkeypatch.setattr(
            faulthandler, name, lambda *args, **options: calls.append((args, options))
        )
    with Watchdog(5) as watchdog:
        watchdog.arm("step 1", 3)
    late = 15 + module.GRACE_SECONDS / 2
    assert calls == [((late,), {"exit": True, "file": 2}), ((), {})]


def test_0_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Thread", None)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", None)
    with Watchdog(0) as watchdog:
        watchdog.arm("step 1")


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_what_is_no_patience_is_refused(seconds: float) -> None:
    with pytest.raises(TilenetError, match="hang_seconds must lie between"):
        Watchdog(seconds)


@pytest.mark.ranks(1, 3)
def test_training_and_prediction_arm_it_around_all_that_may_hang(
    comm: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    armed: list[tuple[str, float]] = []

    def arm(watchdog: Watchdog, doing: str, times: float = 1.0) -> None:
        assert watchdog.who == f"rank {comm.rank} of {comm.size}"
        assert watchdog.hang_seconds == 1234
        armed.append((doing, times))

    monkeypatch.setattr(Watchdog, "arm", arm)
    (scene,) = scenes_of(shared_path, [(97, 130)], comm)
    keys: Any = {"tiles": TileKeys(2, 3), "hang_seconds": 1234, "checkpoint_every": 2}
    run = replace(run_file(shared_path, [scene], NETWORKS["same-nearest"], **keys), steps=3)
    assert train(run, comm=comm) == 0
    survey = [("the survey, part 1 of 1", SLOW)] * (comm.rank == 0)  # it has one block
    opened = [(f"opening the {what}, part 1 of 1", SLOW) for what in ("images", "labels")]
    assert armed == [
        *opened * (comm.rank == 0),  # there is one of each
        ("opening the images on other ranks", SLOW + 1 / comm.size),
        ("the look into the run's folder", SLOW),
        ("the start of the run", SLOW),
        *survey,
        ("the survey on other ranks", SLOW + 1 / comm.size),
        ("the sums of the survey", SLOW),
        ("the plan and the proof of the run", SLOW),
        ("the first weights", SLOW),
        ("step 1", SLOW),
        ("step 2", 1.0),
        ("the checkpoint of step 2", SLOW),
        ("step 3", 1.0),
        ("the checkpoint of step 3", SLOW),
        ("the last checkpoint", SLOW),
        ("the report", SLOW),
        ("the end of the run", SLOW),
    ]
    armed.clear()
    out = str(shared_path / "map.tif")
    done = predict(
        Prediction(run.output, str(scene.image), out, tile_px=40, hang_seconds=1234), comm
    )
    tiles = done["grid"][0] * done["grid"][1]
    assert armed == [
        ("opening the checkpoint and the image", SLOW),
        ("the start of the map", SLOW),
        *(
            (f"the round of tile {start}", 1.0 if start else SLOW)
            for start in range(0, tiles, comm.size)
        ),
        ("the finished map", SLOW + tiles / comm.size),
    ]
    assert len(armed) > 4
