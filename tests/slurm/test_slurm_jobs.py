"""The job of jobs/slurm over virtual nodes: the numbers of mpiexec, whatever stops it."""

import csv
import io
import re
import shlex
import subprocess
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import rasterio
from cluster import ENDS, ENVIRONMENT, Cluster

from launch.__main__ import main as launch
from tilenet.__main__ import main as tilenet

JOB = Path(__file__).resolve().parents[2] / "jobs" / "slurm" / "job.sh"
RANKS, STEPS = 4, 60  # on 2 nodes, with 2 partitions each, as in JOB
HEIGHT, WIDTH = 97, 131
LIMIT_S = 240
STOPPED = 75  # the exit code of tilenet after a signal and a checkpoint
# More tiles than ranks
MORE = "--device cpu --tile 32"
NETWORK = "--poolings 2 --base 4 --dropout 0.2 --bands 4 --classes 3"
RUN = f"""
images: image.tif
labels: labels.tif
classes: 3
device: cpu
network: {{poolings: 2, base: 4, dropout: 0.2}}
optimizer: {{lr: 0.01}}
steps: {STEPS}
checkpoint_every: 1000
output: out
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has who copied jobs/slurm: a scene, a run file, a plan, and the script."""
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
    image = ["--image", f"{HEIGHT}x{WIDTH}", "--grid", "2x4", "--precision", "float64"]
    where = ["--machine", "slurm", "--nodes", "2", "--partitions", "2", "--micro-batches", "2"]
    assert tilenet(["plan", *NETWORK.split(), *image, *where, "-o", str(made / "plan.json")]) == 0
    # The virtual nodes have 64 cores only by name.
    text, changed = re.subn("(?<=OMP_NUM_THREADS=)32", "1", JOB.read_text())
    assert changed == 1
    (made / "job.sh").write_text(text)
    return made


@pytest.fixture(scope="module")
def under_mpiexec(folder: Path) -> Path:
    """The output of the run and its map on as many ranks of one machine."""
    predict = f"predict whole image.tif whole/map.tif --plan plan.json {MORE}"
    for command in ("train -c run.yaml --plan plan.json --output whole", predict):
        done = subprocess.run(
            ["mpiexec", "-n", str(RANKS), "tilenet", *command.split()],
            cwd=folder,
            env={**ENVIRONMENT, "TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "whole"


class Job:
    """A job and its output."""

    def __init__(self, cluster: Cluster, folder: Path, output: str) -> None:
        self.cluster, self.output = cluster, folder / output
        self.log_file = folder / f"{output}.log"
        # the options that its comments say can be given to sbatch, and names in the environment
        options = ("--parsable", "--time=9", "--signal=B:USR1@60", f"--output={self.log_file}")
        variables = {"IMAGE": "image.tif", "OUTPUT": output, "PREDICT": MORE}
        self.number = cluster.answer("sbatch", *options, "job.sh", cwd=folder, variables=variables)

    @property
    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    @property
    def lives(self) -> int:
        shown = self.cluster.answer("scontrol", "show", "job", "-o", self.number)
        return 1 + int(re.findall(r"Restarts=(\d+)", shown)[0])

    @property
    def losses(self) -> list[float]:
        return losses(self.output)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for something that must come before the job ends."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, self.log
            time.sleep(0.05)

    def ends(self) -> tuple[str, int]:
        return self.cluster.wait(self.number, LIMIT_S)

    def queues_again(self) -> None:
        """Wait until it is in the queue again; it need not stay there for the usual 2 minutes.

        But 2 s: a node takes a start in the second of its old end for one that came too late.
        """
        state = self.cluster.wait(self.number, LIMIT_S, ("PENDING", *ENDS))
        assert state[0] == "PENDING", (state, self.log)
        self.cluster.answer("scontrol", "update", f"jobid={self.number}", "StartTime=now+3seconds")


def losses(output: Path) -> list[float]:
    """Of the steps so far, each once and in their order."""
    if not (output / "history.csv").exists():
        return []
    with (output / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    return [float(row["loss"]) for row in rows]


def assert_same_losses(found: Path, wanted: Path) -> None:
    """To 1e-12."""
    ours, theirs = losses(found), losses(wanted)
    assert len(ours) == len(theirs) == STEPS
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 1e-12
    assert theirs[-1] < theirs[0] - 1e-3, "a run that learns nothing proves nothing"


def assert_same(found: Path, wanted: Path) -> None:
    """Losses to 1e-12, the map to the pixel."""
    assert_same_losses(found, wanted)
    maps = []
    for output in (found, wanted):
        with rasterio.open(output / "map.tif") as file:
            maps.append(file.read())
    assert np.array_equal(*maps)
    assert len(np.unique(maps[0])) > 1, "a map of one class proves nothing"


def test_a_job_gives_the_numbers_of_mpiexec(
    cluster: Cluster, folder: Path, under_mpiexec: Path
) -> None:
    job = Job(cluster, folder, "job")
    assert job.ends() == ("COMPLETED", 0), job.log
    assert "4 ranks (2 a node), each with 2 devices" in (folder / "job.sh").read_text()
    assert "a rank has 2 cores, 1 thread, 2 partitions" in job.log
    if not cluster.plain:
        assert "2 nodes n1–n2: ranks 0–3, 2 each" in job.log
    assert_same(job.output, under_mpiexec)
    assert not list(job.output.glob("status*"))


def test_a_job_that_must_make_room_goes_on_to_the_same_numbers(
    cluster: Cluster, folder: Path, under_mpiexec: Path
) -> None:
    """First out of time, while ranks import Python; then preempted, after some steps."""
    job = Job(cluster, folder, "again")
    job.until(lambda: any(file.stat().st_size for file in job.output.glob("status.*")))
    assert job.losses == []
    cluster.answer("scancel", "--batch", "--signal=USR1", job.number)  # as Slurm's --signal=B:
    job.queues_again()
    done = len(job.losses)
    assert 0 < done < STEPS, "it was to stop on the way"
    assert job.lives == 2

    job.until(lambda: len(job.losses) > done)
    other = ("-p", "urgent", "-N3", "--exclusive", "-t1", "-o", "/dev/null", "--wrap", "true")
    cluster.answer("sbatch", *other)
    job.queues_again()
    assert done < len(job.losses) < STEPS, "it was to stop on the way"

    assert job.ends() == ("COMPLETED", 0), job.log
    assert job.lives == 3
    assert_same(job.output, under_mpiexec)


def test_a_job_that_somebody_stops_does_not_come_back(cluster: Cluster, folder: Path) -> None:
    job = Job(cluster, folder, "user")
    job.until(lambda: job.losses)
    cluster.answer("scancel", "--signal=USR1", job.number)
    assert job.ends() == ("FAILED", STOPPED), job.log
    done = len(job.losses)
    assert done < STEPS, "it was to stop on the way"
    assert (job.output / "last").exists()

    job = Job(cluster, folder, "user")  # goes on
    job.until(lambda: len(job.losses) > done)
    cluster.answer("scancel", job.number)
    assert job.ends()[0] == "CANCELLED"
    assert job.lives == 1
    assert not (job.output / "map.tif").exists()


def test_the_line_that_launch_prints_gives_the_numbers_of_mpiexec(
    cluster: Cluster, folder: Path, under_mpiexec: Path
) -> None:
    printed = io.StringIO()
    names = ["--run", "run.yaml", "--image", "", "--output", "line"]
    with redirect_stdout(printed):
        assert launch([str(folder / "plan.json"), "--machine", "slurm", *names]) == 0
    line = shlex.split(printed.getvalue().splitlines()[-1])
    assert line[:3] == ["srun", "-N", "2"]
    done = cluster.run(*line, cwd=folder, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_losses(folder / "line", under_mpiexec)
