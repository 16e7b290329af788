"""What a Slurm shows to ranks: GPUs, each other, and nobody with the wrong plug-in."""

import shlex
import sys
from pathlib import Path

import pytest
from cluster import Cluster

pytestmark = pytest.mark.nightly


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
    # Which ranks share a node is told by Slurm, not by names
    wanted = [[str(i), str(i % 2), "2", "6"] for i in range(6)]
    assert [row[:4] for row in rows] == wanted
    if not cluster.plain:
        assert [row[4] for row in rows] == ["n1", "n1", "n2", "n2", "n3", "n3"]


def test_the_wrong_mpi_plug_in_is_refused_by_name(cluster: Cluster, tmp_path: Path) -> None:
    command = shlex.split("srun --mpi=none -N2 -n2 tilenet train -c run.yaml --output alone")
    done = cluster.run(*command, cwd=tmp_path, limit_s=60)
    assert done.returncode not in (0, 124, 137), done.stdout + done.stderr
    assert "MPI must see the ranks that the launcher starts" in done.stderr
    assert "SLURM_STEP_NUM_TASKS: 2, MPI: 1 rank" in done.stderr
    assert "--mpi=pmi2" in done.stderr
    assert not (tmp_path / "alone").exists()
