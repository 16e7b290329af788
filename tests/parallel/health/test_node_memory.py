"""The least limit of the groups that hold a process is the memory that it may use."""

import os
from pathlib import Path

import pytest

from tilenet.parallel.health import node_memory
from tilenet.parallel.health.node_memory import node_memory_bytes

PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("limits", "own", "memory"),
    [
        ({}, "0::/\n", PHYSICAL),
        ({"": "max"}, "0::/\n", PHYSICAL),
        ({"": "7000"}, "0::/\n", 7000),  # a container
        ({"slurm/job_3": "9000", "slurm/job_4": "5"}, "0::/slurm/job_3/step_0\n", 9000),
        ({"slurm": "8000", "slurm/job_3": "9000"}, "0::/slurm/job_3/step_0\n", 8000),
        ({"slurm/job_3": str(2 * PHYSICAL)}, "0::/slurm/job_3\n", PHYSICAL),
        ({"slurm/job_3": "9000"}, "5:memory:/slurm/job_3\n0::/\n", PHYSICAL),
        ({"slurm/job_3": "9000"}, "0::/../../elsewhere\n", PHYSICAL),
    ],
)
def test_limits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limits: dict[str, str],
    own: str,
    memory: int,
) -> None:
    monkeypatch.setattr(node_memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(node_memory, "OWN_CGROUP", tmp_path / "own")
    (tmp_path / "own").write_text(own)
    for group, limit in limits.items():
        (tmp_path / "cgroup" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / group / "memory.max").write_text(limit + "\n")
    assert node_memory_bytes() == memory


def test_a_kernel_without_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_memory, "OWN_CGROUP", tmp_path / "none")
    monkeypatch.setattr(node_memory, "CGROUPS", tmp_path / "none")
    assert node_memory_bytes() == PHYSICAL
