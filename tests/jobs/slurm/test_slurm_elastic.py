"""A job on 2 to 3 nodes goes on with those that are left, to the numbers of an undisturbed run."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from job import HEIGHT, NETWORK, RUN, WIDTH, Job, assert_same, under_mpiexec, write_scene

from launch.__main__ import main as launch
from tilenet.__main__ import main as tilenet

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[3]
STEPS, EVERY = 50, 5  # one rank a node
TO = 1e-10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scene, a run file, a plan for 3 nodes, and the script for 2 to 3."""
    made = tmp_path_factory.mktemp("elastic")
    write_scene(made)
    (made / "run.yaml").write_text(f"{RUN}steps: {STEPS}\ncheckpoint_every: {EVERY}\n")
    image = ["--image", f"{HEIGHT}x{WIDTH}", "--grid", "2x3", "--precision", "float64"]
    where = ["--machine", "slurm", "--nodes", "3", "--devices-per-node", "1"]
    plan, script = str(made / "plan.json"), str(made / "job.sh")
    assert tilenet(["plan", *NETWORK.split(), *image, *where, "-o", plan]) == 0
    assert launch([plan, "--nodes", "2-3", "--script", script]) == 0
    text = (made / "job.sh").read_text().replace("PLAN=${PLAN-" + plan, "PLAN=${PLAN-plan.json")
    # The virtual nodes have 64 cores only by name, and a test has no time.
    quick = "import sys; from launch import batch, lives; lives.WATCH_S = 2; "
    quick = f"exec python -c '{quick}sys.exit(batch.main(sys.argv[2:]))' batch"
    for was, now in (
        ("OMP_NUM_THREADS=16", "OMP_NUM_THREADS=1"),
        ("exec tilenet batch", f"export PYTHONPATH={ROOT}\n{quick}"),
    ):
        assert text.count(was) == 1
        text = text.replace(was, now)
    (made / "job.sh").write_text(text)
    return made


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    """The output of the run and its map on 3 ranks of one machine."""
    return under_mpiexec(folder, 3)


@pytest.fixture
def mortal(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster of which a test ends nodes n1 or n2."""
    if cluster.plain:
        pytest.skip("without namespaces the processes of a node cannot be told from others")
    yield cluster
    cluster.start_dead_nodes()


def lives(job: Job) -> list[tuple[int, int]]:
    """Of each life that trained its ranks, and the steps that it had before it."""
    found = re.findall(r" 1 × 1 × (\d) ranks on cpu; .*; (\d+) steps; gradients", job.log)
    return [(int(ranks), STEPS - int(left)) for ranks, left in found]


def test_a_job_goes_on_with_the_nodes_that_are_left(
    mortal: Cluster, folder: Path, undisturbed: Path
) -> None:
    job = Job(mortal, folder, "left")
    job.until(lambda: len(job.losses) > 2 * EVERY)
    mortal.kill_node(2)
    made = len(job.losses)
    assert made < STEPS, "it was to lose its node on the way"
    assert job.ends() == ("COMPLETED", 0), job.log
    assert job.lives == 1, "it was to stay in its allocation"
    assert "nodes: n1,n2,n3, ranks: 3\n" in job.log
    assert "nodes: n1,n3, ranks: 2\n" in job.log
    (before, first), (after, again) = lives(job)
    assert (before, first, after) == (3, 0, 2)
    assert made - EVERY <= again <= made, "it lost more than one interval, or nothing was to lose"
    assert_same(job.output, undisturbed, TO)


def test_a_job_whose_first_node_dies_queues_again(
    mortal: Cluster, folder: Path, undisturbed: Path
) -> None:
    """Its script is gone with the node: another node must notice."""
    job = Job(mortal, folder, "first")
    job.until(lambda: len(job.losses) > 2 * EVERY)
    mortal.kill_node(1)
    made = len(job.losses)
    job.queues_again()
    assert job.ends() == ("COMPLETED", 0), job.log
    assert job.lives == 2
    assert "nodes: n2,n3, ranks: 2\n" in job.log
    (before, first), (after, again) = lives(job)
    assert (before, first, after) == (3, 0, 2)
    assert made - EVERY <= again <= made
    assert_same(job.output, undisturbed, TO)


def test_a_failure_that_is_no_nodes_ends_the_job(cluster: Cluster, folder: Path) -> None:
    job = Job(cluster, folder, "failing", RUN="none.yaml", IMAGE="")
    assert job.ends() == ("FAILED", 1), job.log
    assert job.log.count("train: failed") == 1
