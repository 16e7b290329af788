"""Runs whose folder was copied, emptied, moved or linked, or that were asked to stop too late."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpointed_run import assert_same, rows, train
from safetensors.torch import load_file

from tilenet.errors import AgreedError
from tilenet.geometry.layers import Cellwise, Conv
from tilenet.storage import tensorboard
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.folder import run_folder
from tilenet.training.folder.run_folder import RunFolder
from tilenet.training.network import RunNetwork
from tilenet.training.step import Step

Capture = pytest.CaptureFixture[str]


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("refused", ["package", "transport"])
def test_a_run_that_is_refused_overwrites_nothing(
    scene: Path, copied: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    before = files(copied)
    if refused == "package":
        monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    else:

        def gradient_sum(*_: object) -> None:
            raise AgreedError("nccl needs GPUs")

        monkeypatch.setattr(RunNetwork, "gradient_sum", gradient_sum)
    assert train(scene, copied, "--overwrite", tensorboard=refused == "package") == 1
    assert files(copied) == before


class Killed(BaseException):
    """What no `except` of the program catches."""


def kill(*_: object, **__: object) -> None:
    raise Killed


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_run_that_is_killed_while_it_overwrites_begins_once_more(
    scene: Path, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    half: bool, linked: bool,
) -> None:  # fmt: skip
    """Never does it go on from the run before, whose learning rate was another."""
    if linked:
        shutil.move(copied / "checkpoints", tmp_path / "elsewhere")
        (copied / "checkpoints").symlink_to(tmp_path / "elsewhere")
    rate = {"optimizer.lr": 0.05}

    with monkeypatch.context() as patch:
        patch.setattr(*((shutil, "rmtree") if half else (run_folder, "_empty")), kill)
        assert train(scene, copied, "--overwrite", **rate) == 1
    with monkeypatch.context() as patch:  # once more: in its first step
        patch.setattr(Step, "take", kill)
        assert train(scene, copied, "--resume", **rate) == 1
    assert train(scene, copied, "--resume", **rate) == 0
    assert train(scene, tmp_path / "wanted", **rate) == 0
    assert_same(copied, tmp_path / "wanted")
    assert not (copied / run_folder.BEGINNING).exists()
    assert (copied / "checkpoints").is_symlink() == linked


@pytest.mark.parametrize("alone", [False, True])
def test_a_run_goes_on_from_a_copy_without_links(
    scene: Path, whole: Path, tmp_path: Path, alone: bool
) -> None:
    copy = shutil.copytree(whole, tmp_path / "copy")  # links become folders
    assert not (copy / "last").is_symlink()
    if alone:
        shutil.rmtree(copy / "checkpoints")
    assert train(scene, copy, "--resume", steps=8) == 0
    assert (copy / "last").is_symlink()
    assert (copy / "best").is_symlink()
    assert train(scene, tmp_path / "wanted", steps=8) == 0
    assert_same(copy, tmp_path / "wanted")


@pytest.mark.parametrize("how", ["removed", "moved", "edited"])
def test_a_run_whose_tables_go_does_not_end_well(
    scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture, how: str
) -> None:
    run, take = tmp_path / "run", Step.take

    def disturbed(self: Step, step: int, *rest: object) -> object:
        if step == 3:
            if how == "removed":
                shutil.rmtree(run)
            elif how == "moved":
                run.rename(tmp_path / "other")
            else:  # as sed -i does
                text = (run / "history.csv").read_text()
                (run / "history.csv").unlink()
                (run / "history.csv").write_text(text)
        return take(self, step, *rest)

    monkeypatch.setattr(Step, "take", disturbed)
    assert train(scene, run) == 1
    said = capfd.readouterr().err
    assert "history.csv" in said
    assert "Traceback" not in said


def test_more_steps_than_are_asked_for_are_done(scene: Path, copied: Path, capfd: Capture) -> None:
    assert train(scene, copied, "--resume", steps=4) == 0
    assert "more steps than the run file asks for (6, not 4)" in capfd.readouterr().err


def test_classes_and_the_best_score_stay(scene: Path, copied: Path, capfd: Capture) -> None:
    assert train(scene, copied, "--resume", steps=8, classes="[a,b,c]") == 1
    assert "goes on with the classes that it began with (0, 1, 2" in capfd.readouterr().err
    (copied / "history.csv").write_text("")
    assert train(scene, copied, "--resume", steps=8) == 1
    assert "the names of the columns are missing" in capfd.readouterr().err
    (copied / "history.csv").unlink()
    (copied / "validation.csv").unlink()
    assert train(scene, copied, "--resume", steps=8) == 1
    assert "says which validation was the best" in capfd.readouterr().err
    (copied / "best").unlink()
    assert train(scene, copied, "--resume", steps=8) == 0
    assert [row["step"] for row in rows(copied, "validation.csv")] == ["6", "8"]


ENDS = """
import os, signal, sys, time
from tilenet.parallel.health.signals import StopRequests
with StopRequests() as stop:
    if sys.argv[1] == "stopped":
        os.kill(os.getpid(), signal.SIGTERM)
        stop.agreed = stop.requested
ending = os.getpid()
if os.fork() == 0:  # as job scripts, it goes on until the process is gone
    try:
        while True:
            os.kill(ending, signal.SIGTERM)
            os.kill(ending, signal.SIGUSR1)
    finally:
        os._exit(0)
time.sleep(0.1)
sys.exit(75 if sys.argv[1] == "stopped" else 0)
"""


@pytest.mark.parametrize(("how", "code"), [("stopped", 75), ("finished", 0)])
def test_signals_do_not_kill_a_process_that_ends(how: str, code: int) -> None:
    assert subprocess.run([sys.executable, "-c", ENDS, how], check=False).returncode == code


def test_signals_mean_again_what_they_meant_to_a_program_that_goes_on(
    scene: Path, tmp_path: Path
) -> None:
    caught: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
    try:
        assert train(scene, tmp_path / "run", steps=1) == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert caught == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_scalars_after_a_clock_that_went_back_are_read_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([2 * 10**18, 10**18])
    monkeypatch.setattr(tensorboard.time, "time_ns", lambda: next(times))
    paths = []
    for steps in (0, 4):
        scalars = tensorboard.Scalars(tmp_path, steps, print)
        scalars.close()
        paths.append(scalars._path)
    assert paths == sorted(paths)


def test_a_folder_that_cannot_be_emptied_is_said(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    folder = RunFolder(copied, write=True)
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(Exception, match="an earlier run must be deletable"):
        folder.begin()


def test_a_log_that_takes_no_more_ends_no_run(scene: Path, tmp_path: Path) -> None:
    """As with a disk that is full, or a pipe whose reader has gone."""
    code = (
        "import sys; sys.path[:0] = sys.argv[3].split(':')\\n"
        "from pathlib import Path\\n"
        "from checkpointed_run import train\\n"
        "sys.exit(train(Path(sys.argv[1]), Path(sys.argv[2])))"
    ).replace("\\n", "\n")
    words = [sys.executable, "-c", code, str(scene), str(tmp_path / "run"), ":".join(sys.path)]
    with open("/dev/full", "w") as full:
        assert subprocess.run(words, stderr=full, check=False).returncode == 0
    assert json.loads((tmp_path / "run/last/progress.json").read_text())["step"] == 6


def test_weights_that_are_fixed_from_now_on_make_no_other_network() -> None:
    held = (("weight", (4, 1, 1), True),)
    layers = (Conv(3, 4), Cellwise(4, 4, weights=held))
    numbers = (1, 2, 3), ("a", "b"), 255, (0.0,) * 3, (1.0,) * 3
    record = NetworkRecord(layers, *numbers, None, None, "float32", 0)
    fixed, other = (("weight", (4, 1, 1), False),), (("other", (4, 1, 1), True),)
    for weights, same in ((fixed, True), (other, False)):
        planned = replace(record, layers=(layers[0], replace(layers[1], weights=weights)))
        assert record.same_network(planned) == same


@pytest.mark.parametrize("broken", ["last", "step"])
def test_of_a_copy_without_links_what_is_whole_is_taken(
    scene: Path, whole: Path, tmp_path: Path, broken: str
) -> None:
    copy = shutil.copytree(whole, tmp_path / "copy")
    spoilt = copy / (
        "last" if broken == "last" else f"checkpoints/{(whole / 'last').resolve().name}"
    )
    (spoilt / "weights.safetensors").write_bytes(b"cut off")
    assert train(scene, copy, "--resume", steps=8) == 0
    assert train(scene, tmp_path / "wanted", steps=8) == 0
    assert rows(copy, "history.csv") == rows(tmp_path / "wanted", "history.csv")
    found, wanted = (
        load_file(run / "last/weights.safetensors") for run in (copy, tmp_path / "wanted")
    )
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_copy_without_links_and_rests_of_saves_are_overwritten(
    scene: Path, whole: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(whole, tmp_path / "copy")
    for path in [*(copy / "checkpoints").iterdir()]:
        rest = path.with_name(f".{path.name}.part")
        rest.mkdir()
        (rest / "weights.safetensors").touch()
    assert train(scene, copy, "--overwrite") == 0
    assert_same(copy, whole)
