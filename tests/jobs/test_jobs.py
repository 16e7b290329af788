"""The scripts of jobs/ are what launch/ writes, for plans that fit their run files.

Summit's runs to its map here, with a stand-in for jsrun.
Slurm's runs in tests/jobs/slurm/. How scripts take signals and failures, in tests/launch/.
"""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import rasterio
from launched import write_scene

from launch.__main__ import main as launch
from launch.placement import place
from launch.planned_job import read_job
from tilenet.__main__ import main as tilenet
from tilenet.planning.machines import machine
from tilenet.training.config.read import read_run_file
from tilenet.training.setup import plan_run

ROOT = Path(__file__).resolve().parent.parent.parent
JOBS = ROOT / "jobs"
SCRIPTS = sorted(JOBS.glob("*/job.*"))
PLACES = [path.parent.name for path in SCRIPTS]
LIMIT_S = 300  # matters only on failure
HEIGHT, WIDTH = 70, 90
RUN = """
images: image.tif
labels: labels.tif
classes: 3
device: cpu
network: {poolings: 1, base: 2}
steps: 3
output: out
"""


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No machines of the user's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_scripts_are_what_launch_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the options with which jobs/regenerate.sh calls it."""
    lines = re.findall(r"^script (.*)$", (JOBS / "regenerate.sh").read_text(), re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    for line in lines:
        place_, file, *options = shlex.split(line)
        shutil.copy(JOBS / place_ / "plan.json", tmp_path)
        assert launch(["plan.json", "--machine", place_, "--script", file, *options]) == 0
        same = Path(file).read_text() == (JOBS / place_ / file).read_text()
        assert same, f"jobs/{place_}/{file}: if this is meant, run jobs/regenerate.sh"
    assert sorted(line.split()[0] for line in lines) == PLACES


@pytest.mark.parametrize("name", PLACES)
def test_the_run_file_fits_the_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(JOBS / name)
    run, _ = read_run_file(["-c", "run.yaml", "--plan", "plan.json"])
    job = read_job(Path("plan.json"))
    shapes = (((1, 2, 3, 4), (10_000, 10_000)),) * 4
    planned = plan_run(run, shapes, job.num_ranks)
    assert (planned.mesh.replicas, planned.mesh.rows, planned.mesh.columns) == job.mesh
    assert len(planned.balance) == job.partitions
    assert place(job, machine(name)).ranks == job.num_ranks


@pytest.mark.parametrize("path", SCRIPTS, ids=PLACES)
def test_tilenet_is_called_so_that_it_answers(path: Path) -> None:
    """Frontier's imports MPI before torch."""
    program = re.search(r'--program="(.*)" ', path.read_text())
    command = [*(shlex.split(program[1]) if program else ["tilenet"]), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert re.fullmatch(r"[\w.]+\n", done.stdout)


def test_summits_job_runs_to_its_map(tmp_path: Path) -> None:
    """As it stands: 4 nodes, each with a rank of 6 partitions, by the stand-in for jsrun."""
    write_scene(tmp_path, (HEIGHT, WIDTH))
    (tmp_path / "run.yaml").write_text(RUN)
    network = ["--poolings", "1", "--base", "2", "--bands", "2", "--classes", "3"]
    image = ["--image", f"{HEIGHT}x{WIDTH}", "--grid", "2x2"]
    where = ["--machine", "summit", "--nodes", "4", "--partitions", "6"]
    plan = tmp_path / "plan.json"
    assert tilenet(["plan", *network, *image, *where, "-o", str(plan)]) == 0
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "module").write_text('#!/bin/bash\necho "module $*"\n')
    (tmp_path / "bin" / "module").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{ROOT / 'tests' / 'launch'}:{os.environ['PATH']}"
    env = {"JSRUN_NODES": "4", "JSRUN_THREADS": "1", "IMAGE": "image.tif", "VENV": "", "PATH": path}
    command = ["bash", JOBS / "summit" / "job.lsf"]
    job = subprocess.run(
        command, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert job.returncode == 0, job.stdout + job.stderr
    steps = ["module load open-ce", "train: finished", "predict: finished"]
    assert [line for line in job.stdout.splitlines() if line in steps] == steps
    assert "4 nodes" in job.stderr + job.stdout
    assert "6 partitions on the CPU" in job.stderr + job.stdout
    with rasterio.open(tmp_path / "out" / "map.tif") as file:
        assert file.shape == (HEIGHT, WIDTH)
    assert len((tmp_path / "out" / "history.csv").read_text().splitlines()) == 4
