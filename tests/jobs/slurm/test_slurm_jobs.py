"""The job of jobs/slurm over virtual nodes: the numbers of mpiexec, whatever stops it."""

import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from cluster import Cluster
from job import (
    HEIGHT,
    LIMIT_S,
    NETWORK,
    RUN,
    WIDTH,
    Job,
    assert_same,
    assert_same_losses,
    under_mpiexec,
    write_scene,
)

from launch.__main__ import main as launch
from tilenet.__main__ import main as tilenet

JOB = Path(__file__).resolve().parents[3] / "jobs" / "slurm" / "job.sh"
RANKS, STEPS = 4, 60  # on 2 nodes, with 2 partitions each, as in JOB
STOPPED = 75  # the exit code of tilenet after a signal and a checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has who copied jobs/slurm: a scene, a run file, a plan, and the script."""
    made = tmp_path_factory.mktemp("job")
    write_scene(made)
    (made / "run.yaml").write_text(f"{RUN}steps: {STEPS}\ncheckpoint_every: 1000\n")
    image = ["--image", f"{HEIGHT}x{WIDTH}", "--grid", "2x4", "--precision", "float64"]
    where = ["--machine", "slurm", "--nodes", "2", "--partitions", "2", "--micro-batches", "2"]
    assert tilenet(["plan", *NETWORK.split(), *image, *where, "-o", str(made / "plan.json")]) == 0
    # The virtual nodes have 64 cores only by name.
    text, changed = re.subn("(?<=OMP_NUM_THREADS=)32", "1", JOB.read_text())
    assert changed == 1
    (made / "job.sh").write_text(text)
    return made


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    """The output of the run and its map on as many ranks of one machine."""
    return under_mpiexec(folder, RANKS)


def test_a_job_gives_the_numbers_of_mpiexec(
    cluster: Cluster, folder: Path, undisturbed: Path
) -> None:
    job = Job(cluster, folder, "job")
    assert job.ends() == ("COMPLETED", 0), job.log
    assert "4 ranks (2 a node), each with 2 devices" in (folder / "job.sh").read_text()
    assert "a rank has 2 cores, 1 thread, 2 partitions" in job.log
    if not cluster.plain:
        assert "2 nodes n1–n2: ranks 0–3, 2 each" in job.log
    assert_same(job.output, undisturbed)
    assert not list(job.output.glob("status*"))


@pytest.mark.nightly
def test_a_job_that_must_make_room_goes_on_to_the_same_numbers(
    cluster: Cluster, folder: Path, undisturbed: Path
) -> None:
    """First out of time, while ranks import Python; then preempted, after some steps."""
    job = Job(cluster, folder, "again")
    job.until(lambda: any(file.stat().st_size for file in job.output.glob("status.*")))
    assert job.losses == []
    cluster.answer("scancel", "--batch", "--signal=USR1", job.number)  # as Slurm's --signal=B:
    job.queues_again()
    done = len(job.losses)
    assert done < STEPS, "it was to stop on the way"
    assert job.lives == 2

    job.until(lambda: len(job.losses) > done)
    other = ("-p", "urgent", "-N3", "--exclusive", "-t1", "-o", "/dev/null", "--wrap", "true")
    cluster.answer("sbatch", *other)
    job.queues_again()
    assert done < len(job.losses) < STEPS, "it was to stop on the way"

    assert job.ends() == ("COMPLETED", 0), job.log
    assert job.lives == 3
    assert_same(job.output, undisturbed)


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_the_line_that_launch_prints_gives_the_numbers_of_mpiexec(
    cluster: Cluster, folder: Path, undisturbed: Path
) -> None:
    printed = io.StringIO()
    names = ["--run", "run.yaml", "--image", "", "--output", "line"]
    with redirect_stdout(printed):
        assert launch([str(folder / "plan.json"), "--machine", "slurm", *names]) == 0
    line = shlex.split(printed.getvalue().splitlines()[-1])
    assert line[:3] == ["srun", "-N", "2"]
    done = cluster.run(*line, cwd=folder, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_losses(folder / "line", undisturbed)
