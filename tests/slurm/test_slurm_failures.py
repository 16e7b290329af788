"""A rank that fails in whatever way ends the whole job, within seconds, under both launchers."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import ENVIRONMENT, Cluster
from failing_rank import FAULTS

PROGRAM = (sys.executable, "-m", "mpi4py", str(Path(__file__).with_name("failing_rank.py")))
LIMIT_S = 40  # for the whole job; ranks that share few cores take half of it to start
END_S = 15  # from the fault to the job's end; the watchdog takes 4 to 6

# What the job says; who kills a rank from outside leaves it no time for words.
REASONS = {
    "exception": ("[rank 2 of 4] Traceback", "boom"),
    "sys.exit(3)": ("[rank 2 of 4] tilenet: stopped (3)",),
    "sys.exit(0)": ("[rank 2 of 4] tilenet: stopped (0)",),
    # The ranks that wait in MPI may hold the interpreter; then an alarm prints their stacks.
    "hang": ("[rank 2 of 4] tilenet: the sum must end", "most recent call first"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("launcher", ["mpiexec", "srun"])
def test_the_job_ends(
    fault: str,
    launcher: str,
    tmp_path: Path,
    failure_table: list[dict[str, object]],
    request: pytest.FixtureRequest,
) -> None:
    moment = tmp_path / "moment"
    command = [*PROGRAM, fault, str(moment)]
    if launcher == "srun":
        cluster: Cluster = request.getfixturevalue("cluster")
        step = ("--mpi=pmi2", "--kill-on-bad-exit=1", "-N2", "-n4", "--ntasks-per-node=2")
        done = cluster.run("srun", *step, *command, limit_s=LIMIT_S)
    else:
        done = subprocess.run(
            ["timeout", "-k", "3", str(LIMIT_S), "mpiexec", "-n", "4", *command],
            env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},  # a killed mpiexec leaves files there
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_S + 15,
            check=False,
        )
    ended = time.time()
    assert moment.exists(), done.stdout + done.stderr
    seconds = ended - float(moment.read_text())
    failure_table.append(
        {"fault": fault, "launcher": launcher, "seconds": seconds, "exit": done.returncode}
    )
    assert done.returncode != 0, done.stdout + done.stderr
    assert seconds < END_S, done.stdout + done.stderr
    for reason in REASONS.get(fault, ()):
        assert reason in done.stderr
