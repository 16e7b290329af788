"""A run that is killed between any two calls of saving has a whole checkpoint."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_run import assert_same, train
from safetensors.torch import load_file, save_file

import tilenet.training.folder.run_folder
from tilenet.storage import checkpoints as module
from tilenet.storage.checkpoints import (
    FILES,
    Checkpoint,
    checkpoint_of_step,
    save_checkpoint,
    saved_checkpoints,
)
from tilenet.storage.checksums import wrong_file
from tilenet.storage.whole_checkpoint import newest_whole


class Killed(BaseException):
    """What no `except` of the program catches."""


class FileCalls:
    """Calls that change or read files of a folder, counted; at one of them something happens."""

    def __init__(self) -> None:
        self.folder, self.names = "", list[str]()
        self.act: Callable[[int, str], None] | None = None
        sys.addaudithook(self._seen)  # for good: there is no way to take it back

    @contextmanager
    def watched(self, folder: Path, act: Callable[[int, str], None]) -> Iterator[None]:
        """Call `act` before each, with its number and name."""
        self.folder, self.names, self.act = str(folder), [], act
        try:
            yield
        finally:
            self.act = None

    def note(self, name: str) -> None:
        """Count one more."""
        if self.act is not None:
            self.names.append(name)
            self.act(len(self.names), name)

    def _seen(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.act is None or not event.startswith(("open", "os.", "shutil.")):
            return
        paths = [os.fspath(one) for one in arguments if isinstance(one, str | os.PathLike)]
        # shutil names what it deletes by its folder's handle
        if any(str(p).startswith(self.folder) for p in paths) or event in ("os.remove", "os.rmdir"):
            self.note(event)


@pytest.fixture(scope="module")
def calls() -> FileCalls:
    return FileCalls()


@pytest.fixture
def counted(calls: FileCalls, monkeypatch: pytest.MonkeyPatch) -> FileCalls:
    """With calls that no audit sees: to the disk, and safetensors' own."""
    fsync = os.fsync

    def synced(handle: int) -> None:
        calls.note("fsync")
        fsync(handle)

    def saved(values: dict[str, torch.Tensor], path: Path) -> None:
        calls.note("save_file")
        save_file(values, path)
        size = path.stat().st_size
        os.truncate(path, size // 2)
        calls.note("half a file")
        save_file(values, path)

    monkeypatch.setattr(module.os, "fsync", synced)
    monkeypatch.setattr(module, "save_file", saved)
    return calls


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"0.weight": torch.randn(4, 3, 5, generator=generator)}


def save(run: Path, step: int, *, best: bool = False) -> None:
    values = tensors(step)
    save_checkpoint(run, step, Checkpoint(values, {"of": step}, values), keep=1, best=best)


def exit_at(number: int, call: int, name: str) -> None:
    if call == number:
        os._exit(9)


def test_a_save_that_is_killed_at_any_call_leaves_last_and_best_whole(
    tmp_path: Path, counted: FileCalls
) -> None:
    start = tmp_path / "start"
    save(start, 10, best=True)
    save(start, 20)
    found, number, ended = [], 0, 9
    while ended == 9:
        number += 1
        run = tmp_path / str(number)
        shutil.copytree(start, run, symlinks=True)
        child = os.fork()
        if child == 0:  # dies as by kill -9: nothing is closed, nothing is tidied up
            with counted.watched(run, partial(exit_at, number)):
                save(run, 30, best=number % 2 == 0)
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        going_on = newest_whole(run)
        assert going_on.broken == ()
        assert going_on.checkpoint == run / "last"
        step = json.loads((run / "last" / "progress.json").read_text())["step"]
        found.append(step)
        for one in ("last", "best"):
            number_of = json.loads((run / one / "progress.json").read_text())["step"]
            assert torch.equal(
                load_file(run / one / "weights.safetensors")["0.weight"],
                tensors(number_of)["0.weight"],
            )
        assert all(wrong_file(one, FILES) is None for one in saved_checkpoints(run))
        save(run, 40)
        assert wrong_file(run / "last", FILES) is None
        assert not [name for name in os.listdir(run / "checkpoints") if name.endswith(".part")]
        shutil.rmtree(run)
    assert ended == 0
    assert found == sorted(found)  # once it is the last one it stays
    assert {found[0], found[-1]} == {20, 30}
    assert len(found) > 40


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("half a file", 2),
        ("os.rename", 1),
        ("os.symlink", 1),
        ("os.symlink", 2),
        ("os.rename", 4),
        ("os.rmdir", 1),
    ],
)
def test_a_run_that_is_killed_while_it_saves_goes_on_to_the_same_numbers(
    scene: Path,
    whole: Path,
    tmp_path: Path,
    counted: FileCalls,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    which: int,
) -> None:
    run, real = tmp_path / "run", tilenet.training.folder.run_folder.save_checkpoint

    def killed(number: int, event: str) -> None:
        if event == name and counted.names.count(name) == which:
            raise Killed

    def saved(folder: Path, step: int, *rest: Any, **more: Any) -> Path:
        if step < 4:
            return real(folder, step, *rest, **more)
        with counted.watched(run, killed):
            return real(folder, step, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(tilenet.training.folder.run_folder, "save_checkpoint", saved)
        assert train(scene, run, **{"checkpoints.keep": 1}) == 1
    assert "Killed" in capsys.readouterr().err
    step = json.loads((run / "last" / "progress.json").read_text())["step"]
    assert step in (2, 4)
    assert train(scene, run, "--resume", **{"checkpoints.keep": 1}) == 0
    assert_same(run, whole)


def test_of_a_step_that_is_saved_again_and_again_the_newest_comes_last(tmp_path: Path) -> None:
    for keep in (1, 2, 1, 1, 2, 2):
        save_checkpoint(tmp_path, 10, Checkpoint(tensors(10), {}, tensors(10)), keep=keep)
        assert checkpoint_of_step(tmp_path, 10) == (tmp_path / "last").resolve()
        assert saved_checkpoints(tmp_path)[-1] == (tmp_path / "last").resolve()
    newest = checkpoint_of_step(tmp_path, 10)
    save_checkpoint(tmp_path, 100, Checkpoint(tensors(10), {}, tensors(10)), keep=4)
    assert checkpoint_of_step(tmp_path, 100) == (tmp_path / "last").resolve()
    assert checkpoint_of_step(tmp_path, 10) == newest
    assert checkpoint_of_step(tmp_path, 1) is None


def test_a_checkpoint_that_was_never_named_takes_no_place(tmp_path: Path) -> None:
    """Killed after it renamed the folder of step 30, a run goes on from 20, and stops at 25."""
    for step in (10, 20):
        save(tmp_path, step)
    shutil.copytree((tmp_path / "last").resolve(), tmp_path / "checkpoints" / "step-00000030")
    values = tensors(25)
    save_checkpoint(tmp_path, 25, Checkpoint(values, {}, values), keep=2)
    kept = [one.name for one in saved_checkpoints(tmp_path)]
    assert kept == [f"step-{n:08d}" for n in (20, 25, 30)]
    save_checkpoint(tmp_path, 30, Checkpoint(values, {}, values), keep=2)
    kept = [one.name for one in saved_checkpoints(tmp_path)]
    assert kept == ["step-00000030", "step-00000030.1"]


def test_a_run_with_nothing_left_to_do_clears_what_was_half_deleted(
    scene: Path, whole: Path, copied: Path
) -> None:
    run = copied
    (run / "checkpoints" / "step-00000002").rename(run / "checkpoints" / ".step-00000002.part")
    (run / ".best.part").symlink_to("checkpoints/step-00000006")
    for name in ("timings.json.part", "run.json.part", ".history.csv.part"):
        (run / name).write_text("half of it")
    before = {path.name for path in whole.iterdir()}
    assert train(scene, run, "--resume") == 0
    assert {path.name for path in run.iterdir()} == before
    assert sorted(os.listdir(run / "checkpoints")) == [one.name for one in saved_checkpoints(run)]
