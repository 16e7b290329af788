"""The least limit of what holds a process is the memory that it may use."""

import os
from pathlib import Path

import pytest

from tilenet.parallel.health import node_memory
from tilenet.parallel.health.node_memory import node_memory_bytes

PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
V1, V2 = "memory.limit_in_bytes", "memory.max"


@pytest.mark.parametrize(
    ("limits", "own", "memory"),
    [
        ({}, "0::/\n", PHYSICAL),
        ({V2: "max"}, "0::/\n", PHYSICAL),
        ({V2: "7000"}, "0::/\n", 7000),  # a container
        ({V2: "7000"}, None, 7000),
        ({f"job_3/{V2}": "9000", f"job_4/{V2}": "5"}, "0::/job_3/step_0\n", 9000),
        ({f"slurm/{V2}": "8000", f"slurm/job_3/{V2}": "9000"}, "0::/slurm/job_3/step_0\n", 8000),
        ({f"job_3/{V2}": str(2 * PHYSICAL)}, "0::/job_3\n", PHYSICAL),
        ({f"../{V2}": "5", f"../elsewhere/{V2}": "6"}, "0::/../elsewhere\n", PHYSICAL),
        ({f"memory/slurm/job_3/{V1}": "9000"}, "5:memory:/slurm/job_3/step_0\n0::/\n", 9000),
        ({f"memory/{V1}": str(2**63 - 4096)}, "5:memory:/slurm\n", PHYSICAL),
        ({f"cpu/slurm/{V1}": "9000", f"slurm/{V2}": "9000"}, "5:cpu:/slurm\n", PHYSICAL),
    ],
)
def test_groups(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limits: dict[str, str],
    own: str | None,
    memory: int,
) -> None:
    groups = tmp_path / "cgroup"
    monkeypatch.setattr(node_memory, "CGROUPS", groups)
    monkeypatch.setattr(node_memory, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.delenv("SLURM_MEM_PER_NODE", raising=False)
    if own is not None:
        (tmp_path / "own").write_text(own)
    groups.mkdir()
    for name, limit in limits.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(limit + "\n")
    assert node_memory_bytes() == memory


@pytest.mark.parametrize(
    ("megabytes", "memory"),
    [("7", 7 << 20), ("0", PHYSICAL), ("", PHYSICAL), ("99999999", PHYSICAL)],
)
def test_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, megabytes: str, memory: int
) -> None:
    monkeypatch.setattr(node_memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(node_memory, "OWN_CGROUPS", tmp_path / "none")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", megabytes)
    assert node_memory_bytes() == memory
