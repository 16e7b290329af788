"""Ctrl-C ends each command in one line that says what is kept, with exit code 130."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilenet.__main__ import main
from tilenet.cli import evaluate, halo, info, plan, preview, report
from tilenet.mapping.job import Mapper
from tilenet.parallel.ranks.start import CtrlC, kept_on_ctrl_c, stopped_by
from tilenet.training.step import Step

NOTHING = "nothing was written: give the same command again"


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """As they were: a command that was interrupted is about to end, and leaves its own."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def files(tmp_path: Path, write_raster: Callable[..., str]) -> Path:
    random = np.random.default_rng(5)
    write_raster("image.tif", random.integers(1, 900, (2, 48, 61)).astype(np.uint16))
    write_raster("labels.tif", random.integers(0, 3, (48, 61)).astype(np.uint8))
    return tmp_path


def press_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int = 1) -> None:
    """Have Ctrl-C come while a function is called for the `call`-th time, of a new command."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    real, calls = getattr(owner, name), []

    def pressed(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, pressed)


def train(files: Path, *more: str) -> list[str]:
    inputs = ["--images", str(files / "image.tif"), "--labels", str(files / "labels.tif")]
    network = ["--network.poolings", "1", "--network.base", "2", "--classes", "3"]
    length = ["--steps", "9", "--checkpoint_every", "2", "--crop_px", "16", "--device", "cpu"]
    return ["train", *inputs, *network, *length, "--output", str(files / "run"), *more]


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Lines that speak of Ctrl-C or of where it came; the others are of bars and plans."""
    lines = capfd.readouterr().err.replace("\r", "\n").splitlines()
    assert not any("Traceback" in line or "KeyboardInterrupt" in line for line in lines)
    return [line for line in lines if "Ctrl-C" in line]


@pytest.mark.parametrize(
    ("owner", "name", "arguments"),
    [
        (halo, "calculate", ["halo", "--poolings", "2", "--image", "100"]),
        (info, "describe", ["info", "image.tif"]),
        (plan, "answer", ["plan", "--poolings", "2", "--image", "64", "--machine", "summit"]),
        (preview, "_preview", ["preview", "image.tif", "out.png"]),
        (evaluate, "confusion_matrix", ["evaluate", "labels.tif", "labels.tif"]),
        (report, "write_report", ["report", "run"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_each_command_says_one_line(
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    owner: Any,
    name: str,
    arguments: list[str],
) -> None:
    monkeypatch.chdir(files)
    press_at(monkeypatch, owner, name)
    assert main(arguments) == 130
    assert said(capfd) == [f"tilenet: stopped by Ctrl-C; {NOTHING}"]


@pytest.mark.parametrize(
    ("step", "kept"),
    [
        (2, "there was no checkpoint yet: the same command starts from the beginning"),
        (6, "the checkpoint of step 4 is kept: go on with --resume"),
    ],
)
def test_training_says_which_checkpoint_is_kept(
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    step: int,
    kept: str,
) -> None:
    with monkeypatch.context() as once:
        press_at(once, Step, "take", step)
        assert main(train(files)) == 130
    assert said(capfd) == [f"tilenet: stopped by Ctrl-C; {kept}"]
    assert main(train(files, "--resume")) == 0


@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_a_map_says_whether_it_goes_on(
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    more: list[str],
) -> None:
    assert main(train(files, "--steps", "1")) == 0
    paths = [str(files / name) for name in ("run", "image.tif", "map.tif")]
    with monkeypatch.context() as once:
        press_at(once, Mapper, "tiles", 4)
        assert main(["predict", *paths, "--tile", "16", "--device", "cpu", *more]) == 130
    (line,) = said(capfd)
    kept = "what was done" if more else "nothing"
    assert line.startswith(f"tilenet: stopped by Ctrl-C; {kept} of the map is kept: the same")
    left = [name for name in os.listdir(files) if "map.tif" in name]
    assert sorted(left) == [f".map.tif.{part}.part" for part in ("journal", "raw") if more]
    assert main(["predict", *paths, "--tile", "16", "--device", "cpu", "--resume"]) == 0


PROGRAM = """
import os, signal, sys, tilenet.__main__ as program

def slow(name):
    os.kill(os.getpid(), signal.SIGINT)
    raise SystemError("a module in C that was interrupted")

program.import_module = slow
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background may ignore it
sys.exit(program.main(["train", "-c", "run.yaml"]))
"""


@pytest.mark.parametrize("rank", ["", "0", "2"])
def test_imports_are_interrupted_in_one_line_of_the_first_rank(rank: str) -> None:
    environment = {name: text for name, text in os.environ.items() if "_RANK" not in name}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment | ({"PMI_RANK": rank} if rank else {}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    line = "tilenet: stopped by Ctrl-C; nothing was written: give the same command again\n"
    assert (done.returncode, done.stderr) == (130, "" if rank == "2" else line)


def test_what_came_of_ctrl_c_is_told_from_other_errors() -> None:
    def converted(first: BaseException) -> BaseException:
        try:
            try:
                raise first
            except BaseException as error:
                raise SystemError("returned a result with an exception set") from error
        except SystemError as error:
            return error

    assert stopped_by(converted(KeyboardInterrupt())) == f"tilenet: stopped by Ctrl-C; {NOTHING}"
    assert stopped_by(converted(CtrlC("a\x1b"))) == r"tilenet: stopped by Ctrl-C; a\x1b"
    assert stopped_by(converted(ZeroDivisionError())) is None
    nested = kept_on_ctrl_c(lambda: "outer"), kept_on_ctrl_c(lambda: "inner")
    with pytest.raises(CtrlC, match="inner"), nested[0], nested[1]:
        raise KeyboardInterrupt


def test_a_working_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    """Before any library looks for its files: MKL ends the process there."""
    gone = tmp_path / "gone"
    gone.mkdir()
    program = "import os, sys; os.rmdir(os.getcwd()); from tilenet.__main__ import main; "
    for arguments in (["info", "a.tif"], ["train", "-c", "a.yaml"], ["halo", "--poolings", "1"]):
        gone.mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", f"{program}sys.exit(main({json.dumps(arguments)}))"],
            cwd=gone,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 1
        assert done.stderr == (
            "tilenet: the working directory must exist, and you may enter it (of this one: No such "
            "file or directory); change into another one with cd\n"
        )
