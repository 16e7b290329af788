"""Two jobs that are to write the same run or the same map: one of them is refused, none loses."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from launched import mpiexec

pytestmark = pytest.mark.alone

STEPS, RANKS = 25, 2
LIMIT_S = 120  # matters only on failure


@pytest.fixture
def job(write_raster: Callable[..., str], tmp_path: Path) -> list[str]:
    """A run of some steps on two ranks."""
    rng = np.random.default_rng(6)
    pixels = rng.integers(1, 4000, (2, 61, 83)).astype(np.uint16)
    keys = {
        "images": write_raster("image.tif", pixels),
        "labels": write_raster("labels.tif", (pixels[0] // 1400).astype(np.uint8)),
        "output": tmp_path / "run",
        "classes": 3,
        "steps": STEPS,
        "checkpoint_every": 4,
        "network.poolings": 1,
        "network.base": 4,
        "tiles.rows": 1,
        "tiles.columns": RANKS,
        "device": "cpu",
    }
    return ["train", *(f"--{name}={value}" for name, value in keys.items())]


def command(*arguments: str) -> list[str]:
    return ["mpiexec", "-n", str(RANKS), sys.executable, "-m", "tilenet", *arguments]


@contextmanager
def suspended(arguments: list[str], sign: Path) -> Iterator[None]:
    """A job that is under way, as a file tells, is stopped meanwhile, and ends well after it."""
    words, pipe = command(*arguments), subprocess.PIPE
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        words, stderr=pipe, text=True, start_new_session=True, env=environment
    ) as running:
        try:
            until = time.monotonic() + LIMIT_S
            while not sign.exists() or sign.stat().st_size < 100:
                assert running.poll() is None, running.communicate()
                assert time.monotonic() < until
                time.sleep(0.002)
            os.killpg(running.pid, signal.SIGSTOP)
            # MPICH's ranks are in groups of their own
            subprocess.run(["pkill", "-STOP", "-f", str(sign.parent)], check=False)
            yield
            subprocess.run(["pkill", "-CONT", "-f", str(sign.parent)], check=False)
            os.killpg(running.pid, signal.SIGCONT)
            said = running.communicate(timeout=LIMIT_S)[1]
            assert running.returncode == 0, said
        except BaseException:
            subprocess.run(["pkill", "-KILL", "-f", str(sign.parent)], check=False)
            running.kill()
            raise


def started(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True)


def test_a_second_job_is_refused_while_the_first_writes_the_run(
    job: list[str], tmp_path: Path
) -> None:
    history = tmp_path / "run" / "history.csv"
    with suspended(job, history):
        seconds = [started(*job, *flags) for flags in ([], ["--overwrite"])]
        for second in seconds:
            said = second.communicate(timeout=LIMIT_S)[1]
            assert second.returncode == 1
            assert "Traceback" not in said
            assert re.search(
                r"^tilenet: one job at a time writes the run's folder \S+/run \(process \d+ on "
                r"host \S+ has written it since \d{4}-\d\d-\d\d \S+\); wait for its end, or "
                r"delete \S+/run/\.lock if it no longer runs$",
                said,
                re.MULTILINE,
            ), said
    with history.open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, STEPS + 1))


@pytest.mark.nightly
def test_a_second_map_is_refused_while_the_first_is_written(job: list[str], tmp_path: Path) -> None:
    subprocess.run(command(*job, "--steps=1"), check=True, capture_output=True, timeout=LIMIT_S)
    words = ["predict", str(tmp_path / "run"), str(tmp_path / "image.tif")]
    words += [str(tmp_path / "map.tif"), "--tile", "8"]
    with suspended(words, tmp_path / ".map.tif.lock.part"):
        second = mpiexec(RANKS, "-m", "tilenet", *words, "--overwrite")
        assert second.returncode == 1
        assert re.search(r"^tilenet: one job at a time writes the map .*map.tif", second.stderr)
    assert (tmp_path / "map.tif").exists()
    assert not list(tmp_path.glob(".map*"))


def test_a_run_whose_history_lost_rows_goes_on_only_without_it(
    job: list[str], tmp_path: Path
) -> None:
    from tilenet.__main__ import main

    history = tmp_path / "run" / "history.csv"
    assert main([*job, "--steps=8", "--device=cpu"]) == 0
    lines = history.read_text().splitlines(keepends=True)
    history.write_text("".join(lines[:4]))
    before = history.read_bytes()
    assert main([*job, "--steps=10", "--resume"]) == 1
    assert history.read_bytes() == before
    history.unlink()
    assert main([*job, "--steps=10", "--resume"]) == 0
    assert main([*job, "--steps=11", "--resume"]) == 0
    with history.open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [9, 10, 11]
