"""A job of jobs/ over nodes of a Slurm: the same numbers as under mpiexec, stopped or not."""

import csv
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import rasterio
from cluster import ENDS, ENVIRONMENT, Cluster

JOB = Path(__file__).resolve().parents[2] / "jobs" / "train-slurm.sh"
NODES, RANKS_PER_NODE, STEPS = 2, 2, 20
HEIGHT, WIDTH = 97, 131
LIMIT_S = 120
STOPPED = 75  # the exit code of tilenet after a signal and a checkpoint
PREDICT = "--device cpu --tile 32"  # more tiles than ranks
RUN = f"""
images: image.tif
labels: labels.tif
classes: 3
precision: float64
device: cpu
partitions: 2
micro_batches: 2
network: {{poolings: 2, base: 4, dropout: 0.2}}
tiles: {{rows: 2, columns: 4}}
optimizer: {{lr: 0.02}}
steps: {STEPS}
output: out
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random scene, a run file, and the job as a user changes it."""
    made = tmp_path_factory.mktemp("job")
    rng = np.random.default_rng(7)
    labels = np.kron(rng.integers(0, 3, (7, 9)), np.ones((16, 16)))[:HEIGHT, :WIDTH]
    pixels = 1000 * labels + rng.integers(1, 1500, (4, HEIGHT, WIDTH))  # so that it can be learned
    grid = {"driver": "GTiff", "height": HEIGHT, "width": WIDTH, "crs": "EPSG:32630"}
    grid["transform"] = rasterio.Affine(2, 0.1, 5e5, 0.1, -2, 4e6)
    with rasterio.open(made / "image.tif", "w", count=4, dtype="uint16", nodata=0, **grid) as out:
        out.write(pixels.astype(np.uint16))
    with rasterio.open(made / "labels.tif", "w", count=1, dtype="uint8", **grid) as out:
        out.write(labels.astype(np.uint8), 1)
    (made / "run.yaml").write_text(RUN)
    return made


@pytest.fixture(scope="module")
def under_mpiexec(folder: Path) -> Path:
    """The output of the run and its map on as many ranks of one machine."""
    predict = f"predict whole image.tif whole/map.tif {PREDICT}"
    for command in ("train -c run.yaml --output whole", predict):
        done = subprocess.run(
            ["mpiexec", "-n", str(NODES * RANKS_PER_NODE), "tilenet", *command.split()],
            cwd=folder,
            env={**ENVIRONMENT, "TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "whole"


def submit(cluster: Cluster, folder: Path, output: str) -> str:
    """Submit the job, changed as it says that it can be; return its number."""
    variables = {
        "RUN": "run.yaml",
        "IMAGE": "image.tif",
        "OUTPUT": output,
        "MPI": "pmi2",
        "PARTITIONS": "",
    }
    text, changed = re.subn(r"(predict .* --overwrite)", rf"\1 {PREDICT}", JOB.read_text())
    assert changed == 1
    script = folder / f"{output}.sh"
    script.write_text(text)
    tasks = (f"--nodes={NODES}", f"--ntasks-per-node={RANKS_PER_NODE}", "--cpus-per-task=1")
    options = ("--parsable", *tasks, "--time=5", f"--output={output}.log")
    return cluster.answer("sbatch", *options, script, cwd=folder, variables=variables)


def losses(output: Path) -> list[float]:
    with (output / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    return [float(row["loss"]) for row in rows]


def assert_same(found: Path, wanted: Path) -> None:
    """Losses to 1e-12, the map to the pixel."""
    ours, theirs = losses(found), losses(wanted)
    assert len(ours) == len(theirs) == STEPS
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 1e-12
    assert theirs[-1] < theirs[0] - 1e-3, "a run that learns nothing proves nothing"
    maps = []
    for output in (found, wanted):
        with rasterio.open(output / "map.tif") as file:
            maps.append(file.read())
    assert np.array_equal(*maps)
    assert len(np.unique(maps[0])) > 1, "a map of one class proves nothing"


def test_a_job_over_nodes_gives_the_numbers_of_mpiexec(
    cluster: Cluster, folder: Path, under_mpiexec: Path
) -> None:
    log = folder / "job.log"
    ended = cluster.wait(submit(cluster, folder, "job"), LIMIT_S)
    assert ended == ("COMPLETED", 0), log.read_text()
    if not cluster.plain:
        assert "2 nodes n1–n2: ranks 0–3, 2 each" in log.read_text()
    assert_same(folder / "job", under_mpiexec)


@pytest.mark.parametrize("told", ["script", "ranks"])
def test_a_job_that_is_asked_to_stop_goes_on_to_the_same_numbers(
    cluster: Cluster, folder: Path, under_mpiexec: Path, told: str
) -> None:
    number = submit(cluster, folder, told)
    output, log = folder / told, folder / f"{told}.log"
    until = time.monotonic() + LIMIT_S
    while not (output / "history.csv").exists() or not losses(output):
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.02)
    if told == "script":  # as the batch system does before the time limit: the job queues again
        cluster.answer("scancel", "--batch", "--signal=USR1", number)
        assert cluster.wait(number, LIMIT_S, ("PENDING", *ENDS))[0] == "PENDING", log.read_text()
    else:  # as a user does who wants the job to end
        cluster.answer("scancel", "--signal=USR1", number)
        assert cluster.wait(number, LIMIT_S) == ("FAILED", STOPPED), log.read_text()
    assert len(losses(output)) < STEPS, "it was to stop on the way"
    assert not (output / "map.tif").exists()
    if told == "script":
        time.sleep(3)  # the old script may still be ending, and its end would count for the new one
        cluster.answer("scontrol", "update", f"jobid={number}", "StartTime=now")  # not in 2 min
    else:
        number = submit(cluster, folder, told)
    assert cluster.wait(number, LIMIT_S) == ("COMPLETED", 0), log.read_text()
    assert_same(output, under_mpiexec)


def visible(cluster: Cluster, *options: str) -> dict[str, list[str]]:
    """The GPUs that Slurm shows to each task, by node."""
    step = ("-N2", "-n4", "--ntasks-per-node=2", "--gpus-per-node=4", "--mpi=none", *options)
    show = "echo $SLURMD_NODENAME $SLURM_GPUS_ON_NODE ${CUDA_VISIBLE_DEVICES-unset}"
    nodes: dict[str, list[str]] = {}
    for line in cluster.answer("srun", *step, "sh", "-c", show).splitlines():
        node, count, devices = line.split()
        assert count == "4"
        nodes.setdefault(node, []).append(devices)
    assert len(nodes) == 2
    return nodes


def test_gpus_per_task_gives_each_task_its_own(cluster: Cluster) -> None:
    for tasks in visible(cluster, "--gpus-per-task=2").values():
        assert sorted(tasks) == ["0,1", "2,3"]


def test_no_binding_shows_each_task_all_gpus_of_its_node(cluster: Cluster) -> None:
    for tasks in visible(cluster, "--gpu-bind=none").values():
        assert tasks == ["unset", "unset"]  # nothing hides any


def test_ranks_of_a_node_find_each_other_and_no_others(cluster: Cluster) -> None:
    program = (
        "import socket; from mpi4py import MPI; w = MPI.COMM_WORLD;"
        "n = w.Split_type(MPI.COMM_TYPE_SHARED);"
        "print(w.rank, n.rank, n.size, w.size, socket.gethostname())"
    )
    step = ("--mpi=pmi2", "-N3", "-n6", "--ntasks-per-node=2", "--kill-on-bad-exit=1")
    shown = cluster.answer("srun", *step, sys.executable, "-m", "mpi4py", "-c", program)
    rows = [line.split() for line in sorted(shown.splitlines())]
    if cluster.plain:
        assert [row[:4] for row in rows] == [[str(i), str(i), "6", "6"] for i in range(6)]
    else:
        wanted = [[str(i), str(i % 2), "2", "6", f"n{i // 2 + 1}"] for i in range(6)]
        assert rows == wanted


def test_the_wrong_mpi_plug_in_is_refused_by_name(cluster: Cluster, folder: Path) -> None:
    command = shlex.split("srun --mpi=none -N2 -n2 tilenet train -c run.yaml --output alone")
    done = cluster.run(*command, cwd=folder, limit_s=60)
    assert done.returncode not in (0, 124, 137), done.stdout + done.stderr
    assert "MPI must see the ranks that the launcher starts" in done.stderr
    assert "SLURM_STEP_NUM_TASKS: 2, MPI: 1 rank" in done.stderr
    assert "--mpi=pmi2" in done.stderr
    assert not (folder / "alone").exists()
