"""Runs whose tensors find no room to be swapped to say so, end on all ranks, and leave no file."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import mpiexec, write_scene

MORE = ["--swap=all", "--swapping.min_mib=0", "--tiles.rows=2", "--tiles.columns=2"]


@pytest.fixture
def run_keys(tmp_path: Path) -> list[str]:
    """Arguments of a run on a scene of noise."""
    write_scene(tmp_path, (192, 192), bands=3)
    (tmp_path / "swap").mkdir()
    return [
        f"--images={tmp_path}/image.tif",
        f"--labels={tmp_path}/labels.tif",
        "--classes=3",
        f"--output={tmp_path}/run",
        "--network.poolings=2",
        "--network.base=8",
        f"--swapping.folder={tmp_path}/swap",
        *MORE,
    ]


# A file may grow to so many bytes: beyond them the system refuses, as it does where a disk is full.
# Once MPI is up, which has larger ones of its own.
LIMITED = """
import resource, runpy, sys
from mpi4py import MPI
resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, 4_000_000))
runpy.run_module("tilenet", run_name="__main__", alter_sys=True)
"""


def failed(keys: list[str], *program: str) -> str:
    run = program or ("-m", "tilenet")
    ended = mpiexec(2, *run, "train", *keys, "--steps=1000")
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    return ended.stderr


PIPELINE = ["--partitions=3", "--checkpointing=always", "--micro_batches=2"]


@pytest.mark.parametrize("pipeline", [[], PIPELINE], ids=["layers", "stores"])
def test_a_full_host(tmp_path: Path, run_keys: list[str], pipeline: list[str]) -> None:
    said = failed([*run_keys, *pipeline, "--swapping.host_gib=0.001"])
    assert "tilenet: tensors that are swapped out must fit the host's share (needed: " in said
    assert "limit: 1.0 MiB); raise that limit (host_limit_bytes, of runs swapping.host_gib)" in said
    assert os.listdir(tmp_path / "swap") == []


@pytest.mark.parametrize("pipeline", [[], PIPELINE], ids=["layers", "stores"])
def test_a_full_disk(tmp_path: Path, run_keys: list[str], pipeline: list[str]) -> None:
    said = failed([*run_keys, *pipeline], "-c", LIMITED)
    assert f"must fit the disk ({tmp_path}/swap: no room for " in said
    assert "choose a larger one (swap_dir, of runs swapping.folder)" in said
    assert os.listdir(tmp_path / "swap") == []


def test_a_folder_that_is_none(tmp_path: Path, run_keys: list[str]) -> None:
    said = failed([*run_keys, f"--swapping.folder={tmp_path}/none"])
    wanted = (
        f"tilenet: tensors are swapped to a file, so its folder must be writable ({tmp_path}/none"
    )
    assert said.count(wanted) == 1


@pytest.mark.parametrize("pipeline", [[], PIPELINE], ids=["layers", "stores"])
def test_a_limit_that_nothing_keeps(run_keys: list[str], pipeline: list[str]) -> None:
    said = failed([*run_keys, *pipeline, "--swap=auto", "--swapping.device_gib=0.0001"])
    assert said.count("tilenet: a step must fit its devices, and swapping does not make it") == 1
    assert "there is: 0.10 MiB); use smaller tiles, more partitions" in said
    assert ("checkpointing: always" in said) == (not pipeline)  # what is there is no remedy


def test_a_killed_run_leaves_no_file(tmp_path: Path, run_keys: list[str]) -> None:
    words = [sys.executable, "-m", "tilenet", "train", *run_keys, "--steps=100000"]
    job = subprocess.Popen(
        ["mpiexec", "-n", "2", *words], stderr=subprocess.DEVNULL, start_new_session=True
    )
    history = tmp_path / "run" / "history.csv"
    end = time.monotonic() + 60
    while not history.exists() or len(history.read_text().splitlines()) < 3:
        assert time.monotonic() < end
        time.sleep(0.1)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait(30)
    swapped = [int(line.split(",")[7]) for line in history.read_text().splitlines()[1:]]
    assert min(swapped) > 0
    assert os.listdir(tmp_path / "swap") == []
