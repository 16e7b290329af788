"""A rank whose peers never come to MPI's start says where it waits, and ends the job."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from launched import mpiexec

from tilenet.errors import TilenetError
from tilenet.parallel.health import watchdog
from tilenet.parallel.ranks.start import watched_start

pytestmark = pytest.mark.alone

PROGRAM = """
    import os, signal, sys, time
    from unittest.mock import MagicMock
    sys.modules["torch"] = MagicMock()  # which takes most of the time, and is not needed
    from tilenet.parallel.ranks.abort import run_as_rank
    from tilenet.parallel.ranks.comm import world

    def program():
        if os.environ["PMI_RANK"] == "1":
            {fault}
        assert world().allreduce(1) == 2
        time.sleep({after})  # longer than the patience, which is over
        return 0

    sys.exit(run_as_rank(program))
"""


def ends(fault: str, after: float = 0) -> subprocess.CompletedProcess[str]:
    program = textwrap.dedent(PROGRAM).format(fault=fault, after=after)
    try:
        return mpiexec(2, "-c", program, limit_s=40, TILENET_START_SECONDS="5")
    except subprocess.TimeoutExpired as hung:
        # Hydra misses one end in 30: it reaps the rank before it reads the rank's closed socket,
        # and then leaves the others. That rank 0 ended, with its reason, is ours to show.
        stderr = (hung.stderr or b"").decode()
        assert "Timeout (0:00:0" in stderr
        return subprocess.CompletedProcess(hung.args, -9, "", stderr)


@pytest.mark.parametrize("fault", ["time.sleep(1000)", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_a_rank_that_never_starts_mpi_ends_the_job(fault: str) -> None:
    """As when Slurm lost the messages of that rank: here it never sends any."""
    ended = ends(fault)
    assert ended.returncode != 0
    named = " in [rank 0, before MPI's start] tilenet: MPI_Init, for which all ranks must come, "
    assert f"{named}must end within 5 s;" in ended.stderr
    assert "raise TILENET_START_SECONDS" in ended.stderr
    assert "in world\n" in ended.stderr
    assert "[rank 1" not in ended.stderr, "it does not wait in MPI's start"


def test_once_started_it_watches_no_more() -> None:
    ended = ends("pass", after=8)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_that_mpi_started_is_left_for_the_job_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILENET_STARTED", str(tmp_path / "started"))
    assert ends("time.sleep(1000)").returncode != 0
    assert list(tmp_path.iterdir()) == []
    assert ends("pass").returncode == 0
    assert [file.name for file in tmp_path.iterdir()] == ["started"]
    monkeypatch.setenv("TILENET_STARTED", str(tmp_path / "no such folder" / "started"))
    assert ends("pass").returncode == 0


def test_a_rank_alone_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """And starts no thread."""
    monkeypatch.setattr(watchdog, "Thread", None)
    for name in ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with watched_start():
        pass
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(TypeError), watched_start():
        pass


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "1e9"])
def test_patience_is_a_number_of_seconds(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILENET_START_SECONDS", text)
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(TilenetError, match="TILENET_START_SECONDS must"), watched_start():
        pass
