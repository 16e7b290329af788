"""Whatever breaks a checkpoint, and whenever a run is killed, it goes on to the same numbers."""

import csv
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from safetensors.torch import load_file, save_file

import tilenet.run.folder
from tilenet.__main__ import main
from tilenet.files import weights as module
from tilenet.files.checksums import wrong_file
from tilenet.files.weights import FILES, save_checkpoint, saved_checkpoints
from tilenet.files.whole_checkpoint import newest_whole
from tilenet.run.step import Step

TABLES = "history.csv", "validation.csv", "confusion.csv"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two images of random pixels, and labels that their first band tells."""
    folder = tmp_path_factory.mktemp("scene")
    rng = np.random.default_rng(3)
    for name in ("train", "held"):
        pixels = rng.integers(1, 200, (2, 40, 52)).astype(np.uint8)
        for path, values in ((f"{name}.tif", pixels), (f"{name}_labels.tif", pixels[:1] // 70)):
            size = {"count": len(values), "height": 40, "width": 52, "dtype": "uint8"}
            with rasterio.open(folder / path, "w", driver="GTiff", crs="EPSG:32630", **size) as f:
                f.write(values)
    return folder


def train(scene: Path, output: Path, *flags: str, **more: object) -> int:
    keys: dict[str, Any] = {
        "images": scene / "train.tif",
        "labels": scene / "train_labels.tif",
        "validation.images": scene / "held.tif",
        "validation.labels": scene / "held_labels.tif",
        "validation.every": 2,
        "classes": 3,
        "output": output,
        "network.poolings": 1,
        "network.base": 4,
        "network.convolutions": 1,
        "network.dropout": 0.2,
        "precision": "float64",
        "device": "cpu",
        "steps": 6,
        "checkpoint_every": 2,
        "checkpoints.keep": 3,
        "hang_seconds": 0,
    }
    given = [f"--{name}={value}" for name, value in (keys | more).items()]
    return main(["train", *given, *flags])


@pytest.fixture(scope="module")
def whole(scene: Path) -> Path:
    """A run that nothing disturbed."""
    assert train(scene, scene / "whole") == 0
    return scene / "whole"


def rows(run: Path, name: str) -> list[dict[str, str]]:
    """Of a table, what is the same in every run."""
    with (run / name).open(newline="") as file:
        found = list(csv.DictReader(file))
    own = {"peak_bytes"} | {key for row in found for key in row if "seconds" in key}
    return [{key: value for key, value in row.items() if key not in own} for row in found]


def assert_same(run: Path, other: Path) -> None:
    """All numbers of two runs to the last bit; and their last and best checkpoints are whole."""
    for name in TABLES:
        assert rows(run, name) == rows(other, name)
        assert rows(run, name)
    for link in ("last", "best"):
        assert wrong_file(run / link, FILES) is None
        assert (run / link).resolve().name.split(".")[0] == (other / link).resolve().name
        for file in ("weights.safetensors", "state.safetensors"):
            found, wanted = (load_file(one / link / file) for one in (run, other))
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], value) for key, value in wanted.items())


def removed(name: str) -> Callable[[Path], None]:
    return lambda run: (run / "last" / name).unlink()


def halved(name: str) -> Callable[[Path], None]:
    return lambda run: os.truncate(run / "last" / name, (run / "last" / name).stat().st_size // 2)


def garbled(name: str) -> Callable[[Path], None]:
    def flip(run: Path) -> None:
        content = bytearray((run / "last" / name).read_bytes())
        content[-5] ^= 4
        (run / "last" / name).write_bytes(content)

    return flip


def other_sum(run: Path) -> None:
    sums = json.loads((run / "last" / "checksums.json").read_text())
    sums["state.safetensors"]["sha256"] = sums["weights.safetensors"]["sha256"]
    (run / "last" / "checksums.json").write_text(json.dumps(sums))


def dangling(run: Path) -> None:
    shutil.rmtree((run / "last").resolve())


def unlinked(run: Path) -> None:
    """A copy without links, whose newest checkpoint is broken."""
    (run / "last" / "state.safetensors").unlink()
    (run / "last").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (removed("weights.safetensors"), "weights.safetensors is missing"),
        (halved("state.safetensors"), r"state.safetensors has \d+ bytes of \d+"),
        (garbled("state.safetensors"), "state.safetensors is not what checksums.json says"),
        (other_sum, "state.safetensors is not what checksums.json says"),
        (dangling, "it is not there"),
        (unlinked, "state.safetensors is missing"),
    ],
    ids=[
        *("no weights", "half a state", "garbled state", "another sum", "dangling", "no link"),
    ],
)
def test_a_run_goes_on_from_the_newest_whole_checkpoint(
    scene: Path,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    said: str,
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run, symlinks=True)
    broken = (run / "last").resolve().name
    damage(run)
    assert train(scene, run, "--resume") == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if " is broken (" in line]
    assert len(warnings) == 1
    named = run / ("last" if damage is not unlinked else f"checkpoints/{broken}")
    chosen = run / "checkpoints" / "step-00000004"
    pattern = rf"{named} is broken \({said}.*\): the run goes on from {chosen}"
    assert re.fullmatch(pattern, warnings[0])
    assert_same(run, whole)
    kept = os.listdir(run / "checkpoints")
    assert (f"broken-{broken}" in kept) == (damage is not dangling)
    # once is enough
    assert train(scene, run, "--resume", steps=7) == 0
    assert " is broken (" not in capsys.readouterr().err


def test_a_best_checkpoint_that_is_broken_is_found_again(
    scene: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run, symlinks=True)
    scores = {int(row["step"]): float(row["mean_iou"]) for row in rows(run, "validation.csv")}
    order = sorted(scores, key=lambda step: -scores[step])
    assert (run / "best").resolve().name == f"step-{order[0]:08d}"
    # so that it is not the last one as well
    last = max(step for step in scores if step != order[0])
    (run / "last").unlink()
    (run / "last").symlink_to(f"checkpoints/step-{last:08d}")
    os.truncate(run / "best" / "state.safetensors", 99)
    assert train(scene, run, "--resume", steps=last) == 0
    assert f"{run / 'best'} is broken (state.safetensors has 99 bytes" in capsys.readouterr().err
    wanted = next(step for step in order[1:] if step <= last)
    assert (run / "best").resolve().name == f"step-{wanted:08d}"
    assert wrong_file(run / "best", FILES) is None


def test_where_all_are_broken_one_sentence_says_so_and_nothing_changes(
    scene: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run, symlinks=True)
    for one in saved_checkpoints(run):
        os.truncate(one / "weights.safetensors", 100)
    before = sorted(run.rglob("*"))
    assert train(scene, run, "--resume") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "a run goes on from a whole checkpoint" in lines[0]
    for named in ("last", "checkpoints/step-00000004", "checkpoints/step-00000002"):
        assert f"{run / named}: weights.safetensors has 100 bytes of" in lines[0]
    assert sorted(run.rglob("*")) == before


def test_a_run_of_an_older_version_goes_on_without_checksums(
    scene: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run, symlinks=True)
    for one in saved_checkpoints(run):
        (one / "checksums.json").unlink()
    assert train(scene, run, "--resume", steps=8) == 0
    assert "broken" not in capsys.readouterr().err
    assert [row["step"] for row in rows(run, "history.csv")] == [str(n) for n in range(1, 9)]


def test_no_map_is_made_of_a_checkpoint_that_nobody_named(
    scene: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "map.tif"
    shutil.copytree(whole, run, symlinks=True)
    arguments = [str(scene / "held.tif"), str(out)]
    os.truncate(run / "last" / "state.safetensors", 100)  # a map needs none
    assert main(["predict", str(run), *arguments]) == 0
    out.unlink()
    capsys.readouterr()
    garbled("weights.safetensors")(run)
    older = run / "checkpoints" / "step-00000004"
    sentence = (
        f"a checkpoint's files must be whole ({run / 'last'}: weights.safetensors is not what "
        f"checksums.json says: its SHA-256 differs); {older} is whole: name that"
    )
    assert main(["predict", str(run), *arguments]) == 1
    assert capsys.readouterr().err == f"tilenet: {sentence}\n"
    assert main(["train", *begun_with(scene, run, tmp_path / "new")]) == 1
    assert sentence in capsys.readouterr().err
    assert not out.exists()
    assert main(["predict", str(older), *arguments]) == 0
    dangling(run)
    assert main(["predict", str(run), *arguments, "--overwrite"]) == 1
    assert f"{run / 'last'}: it is not there); {older} is whole" in capsys.readouterr().err


def begun_with(scene: Path, run: Path, output: Path) -> list[str]:
    keys: dict[str, object] = {"images": scene / "train.tif", "labels": scene / "train_labels.tif"}
    keys |= {"classes": 3, "network.poolings": 1, "network.base": 4, "network.convolutions": 1}
    keys |= {"steps": 0, "precision": "float64", "output": output, "init": run, "device": "cpu"}
    return [f"--{name}={value}" for name, value in keys.items()]


def test_as_many_stay_as_the_run_file_says(scene: Path, whole: Path, tmp_path: Path) -> None:
    assert [one.name for one in saved_checkpoints(whole)] == [f"step-{n:08d}" for n in (2, 4, 6)]
    keys = {"checkpoints.keep": 2, "checkpoint_every": 1, "validation.every": 99}
    assert train(scene, tmp_path / "run", steps=5, **keys) == 0
    assert train(scene, tmp_path / "run", "--resume", steps=6, **keys) == 0
    kept = [one.name for one in saved_checkpoints(tmp_path / "run")]
    assert kept == [f"step-{n:08d}" for n in (5, 6)]


# --- killed between any two calls


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
    save_checkpoint(run, step, values, {"of": step}, values, {"step": step}, keep=1, best=best)


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
    run, real = tmp_path / "run", tilenet.run.folder.save_checkpoint

    def killed(number: int, event: str) -> None:
        if event == name and counted.names.count(name) == which:
            raise Killed

    def saved(folder: Path, step: int, *rest: Any, **more: Any) -> Path:
        if step < 4:
            return real(folder, step, *rest, **more)
        with counted.watched(run, killed):
            return real(folder, step, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(tilenet.run.folder, "save_checkpoint", saved)
        assert train(scene, run, **{"checkpoints.keep": 1}) == 1
    assert "Killed" in capsys.readouterr().err
    step = json.loads((run / "last" / "progress.json").read_text())["step"]
    assert step in (2, 4)
    assert train(scene, run, "--resume", **{"checkpoints.keep": 1}) == 0
    assert_same(run, whole)


# --- in the background


def test_training_goes_on_while_a_checkpoint_is_written(
    scene: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each save but the last waits for the step after it, and the next save for it."""
    run, real, take = tmp_path / "run", tilenet.run.folder.save_checkpoint, Step.take
    made = [threading.Event() for _ in range(7)]
    under_way, most = [], []

    def slow(folder: Path, step: int, *rest: Any, **more: Any) -> Path:
        under_way.append(step)
        most.append(len(under_way))
        assert step == 6 or made[step + 1].wait(60)
        path = real(folder, step, *rest, **more)
        under_way.remove(step)
        return path

    def noted(self: Step, step: int, *rest: Any) -> Any:
        done = take(self, step, *rest)
        made[step + 1].set()
        return done

    def copied(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert under_way == []  # one copy at a time is what memory is planned for
        return copies(values)

    copies = tilenet.run.folder._copies
    monkeypatch.setattr(tilenet.run.folder, "_copies", copied)
    monkeypatch.setattr(tilenet.run.folder, "in_background", lambda parameter: True)
    monkeypatch.setattr(tilenet.run.folder, "save_checkpoint", slow)
    monkeypatch.setattr(Step, "take", noted)
    assert train(scene, run) == 0
    assert (under_way, most) == ([], [1, 1, 1])
    assert_same(run, whole)
    for step in (2, 4):  # copies: what later steps changed is not in them
        name = Path("checkpoints", f"step-{step:08d}", "state.safetensors")
        found, wanted = load_file(run / name), load_file(whole / name)
        assert all(torch.equal(found[key], value) for key, value in wanted.items())


def test_a_run_that_ends_early_waits_for_its_checkpoint(
    scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real, take = tmp_path / "run", tilenet.run.folder.save_checkpoint, Step.take
    fails = threading.Event()

    def slow(*arguments: Any, **more: Any) -> Path:
        assert fails.wait(60)
        return real(*arguments, **more)

    def failing(self: Step, step: int, *rest: Any) -> Any:
        if step == 2:
            fails.set()
            raise tilenet.run.folder.TilenetError("a raster broke")
        return take(self, step, *rest)

    monkeypatch.setattr(tilenet.run.folder, "in_background", lambda parameter: True)
    monkeypatch.setattr(tilenet.run.folder, "save_checkpoint", slow)
    monkeypatch.setattr(Step, "take", failing)
    assert train(scene, run) == 1
    assert wrong_file(run / "last", FILES) is None
    assert not [t for t in threading.enumerate() if t.name == "checkpoint"]
