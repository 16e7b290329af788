"""The scripts of jobs/ are what launch/ writes, for plans that fit their run files.

Summit's runs to its map here, with a stand-in for jsrun, and one of PBS with MPICH's mpiexec.
Slurm's runs in tests/jobs/slurm/. How scripts take signals and failures, in tests/launch/.
"""

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
import rasterio
from launched import write_scene

from launch.__main__ import main as launch
from launch.placement import place
from launch.planned_job import read_job
from tilenet.__main__ import main as tilenet
from tilenet.planning.machines.read import machine
from tilenet.planning.plan import read_plan
from tilenet.training.config.read import read_run_file
from tilenet.training.setup.decide import plan_run

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
        assert len(Path(file).read_text().splitlines()) <= 30, "what is no configuration?"
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
    assert asdict(planned.mesh) == read_plan(Path("plan.json")).mesh
    assert len(planned.balance) == job.partitions
    assert place(job, machine(name)).ranks == job.num_ranks


@pytest.mark.parametrize("path", SCRIPTS, ids=PLACES)
def test_tilenet_is_called_so_that_it_answers(path: Path) -> None:
    """Frontier's imports MPI before torch."""
    program = re.search(r'--program="(.*)" ', path.read_text())
    command = [*(shlex.split(program[1]) if program else ["tilenet"]), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert re.fullmatch(r"[\w.]+\n", done.stdout)


def test_summits_job_runs_to_its_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 2 nodes, each with a rank of 6 partitions, by the stand-in for jsrun."""
    plan_for(tmp_path, "summit", 2, 6)
    monkeypatch.chdir(tmp_path)
    assert launch(["plan.json", "--script", "job.lsf", "--venv", "venv"]) == 0
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "module").write_text('#!/bin/bash\necho "module $*"\n')
    (tmp_path / "bin" / "module").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{ROOT / 'tests' / 'launch'}:{os.environ['PATH']}"
    env = {"JSRUN_NODES": "2", "JSRUN_THREADS": "1", "IMAGE": "image.tif", "VENV": "", "PATH": path}
    said = run_to_its_map(tmp_path, Path("job.lsf"), env)
    assert "module load open-ce" in said.splitlines()
    assert "2 nodes" in said
    assert "6 partitions on the CPU" in said


def test_a_job_of_pbs_runs_to_its_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 nodes of PBS's list, pretended on this one, 2 ranks on each, by MPICH's own mpiexec."""
    plan_for(tmp_path, "pbs", 2, 2)
    monkeypatch.chdir(tmp_path)
    assert launch(["plan.json", "--machine", "pbs", "--script", "job.sh"]) == 0
    text = Path("job.sh").read_text()
    Path("job.sh").write_text(text.replace("OMP_NUM_THREADS=32", "OMP_NUM_THREADS=1"))
    Path("hosts").write_text("n1\nn2\n")
    env = {"PBS_NODEFILE": "hosts", "PBS_O_WORKDIR": str(tmp_path), "IMAGE": "image.tif"}
    mpi = {"HYDRA_LAUNCHER": "fork", "MPIR_CVAR_NUM_CLIQUES": "2"}
    mpi["MPIR_CVAR_CLIQUES_BY_BLOCK"] = "1"
    said = run_to_its_map(tmp_path, Path("job.sh"), env | mpi)
    assert "2 nodes" in said


def plan_for(folder: Path, name: str, nodes: int, partitions: int) -> None:
    """A scene, its run file, and a plan for a machine."""
    write_scene(folder, (HEIGHT, WIDTH))
    (folder / "run.yaml").write_text(RUN)
    network = ["--poolings", "1", "--base", "2", "--bands", "2", "--classes", "3"]
    image = ["--image", f"{HEIGHT}x{WIDTH}", "--grid", "2x2"]
    where = ["--machine", name, "--nodes", str(nodes), "--partitions", str(partitions)]
    plan = folder / "plan.json"
    assert tilenet(["plan", *network, *image, *where, "--json", "-o", str(plan)]) == 0


def run_to_its_map(folder: Path, script: Path, env: dict[str, str]) -> str:
    """What the job says."""
    job = subprocess.run(
        ["bash", script],
        cwd=folder,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    steps = ["train: finished", "predict: finished"]
    assert [line for line in job.stdout.splitlines() if line in steps] == steps
    with rasterio.open(folder / "out" / "map.tif") as file:
        assert file.shape == (HEIGHT, WIDTH)
    assert len((folder / "out" / "history.csv").read_text().splitlines()) == 4
    return job.stdout + job.stderr
