"""A rank that fails in whatever way ends the whole job, within seconds, under all launchers."""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import ENVIRONMENT, Cluster
from failing_rank import FAULTS, OTHERS

HERE = Path(__file__).parent
PROGRAM = (sys.executable, str(HERE / "failing_rank.py"))
STAND_IN = (sys.executable, str(HERE.parents[1] / "launch" / "jsrun.py"))
LAUNCHERS = {
    "mpiexec": ("mpiexec", "-n", "4"),
    "jsrun": (*STAND_IN, "-n2", "-r1", "-a2", "-c2", "-bpacked:1", "-X1", "-EOMP_NUM_THREADS=1"),
    "srun": ("srun", "--mpi=pmi2", "--kill-on-bad-exit=1", "-N2", "-n4", "--ntasks-per-node=2"),
}
LAUNCHERS["srun --wait=2"] = (*LAUNCHERS["srun"], "--wait=2")
CASES: list[Any] = [("mpiexec", fault) for fault in FAULTS | OTHERS]
NIGHTLY = [(launcher, fault) for launcher in ("jsrun", "srun") for fault in FAULTS]
# It makes a difference for a rank that says that it is done.
NIGHTLY.append(("srun --wait=2", "os._exit(0)"))
CASES += [pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY]

LIMIT_S = 120  # for the whole job, which takes 1 to 5 s on idle cores
END_S = 60  # from the fault to the job's end

SENTENCE = "tilenet: the sum must end within 1 s; the stacks show where it hangs, or what is slow:"
# What the job says; who kills a rank from outside leaves it no time for words.
REASONS = {
    "exception": ("[rank 2 of 4] Traceback", "boom"),
    "sys.exit(3)": ("[rank 2 of 4] tilenet: stopped (3)",),
    "sys.exit(0)": ("[rank 2 of 4] tilenet: stopped (0)",),
    "error": ("[rank 2 of 4] tilenet: the disk is full",),
    "interrupt": ("[rank 2 of 4] tilenet: stopped by Ctrl-C",),
    "thread": ("of 4] thread adder: Traceback",),
    "hang, buffers, locked": (f" in [rank 2 of 4] {SENTENCE}", " in lock\n"),
}


@pytest.mark.parametrize(("launcher", "fault"), CASES)
def test_the_job_ends(
    fault: str,
    launcher: str,
    tmp_path: Path,
    failure_table: list[dict[str, object]],
    request: pytest.FixtureRequest,
) -> None:
    moment = tmp_path / "moment"
    command = [*LAUNCHERS[launcher], *PROGRAM, fault, str(moment)]
    if "srun" in command:
        cluster: Cluster = request.getfixturevalue("cluster")
        done = cluster.run(*command, limit_s=LIMIT_S)
    else:
        done = subprocess.run(
            ["timeout", "-k", "3", str(LIMIT_S), *command],
            # a killed mpiexec leaves files in TMPDIR
            env={**ENVIRONMENT, "TMPDIR": str(tmp_path), "JSRUN_NODES": "2"},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_S + 15,
            check=False,
        )
    ended = time.time()
    output = done.stdout + done.stderr
    assert moment.exists(), output
    seconds = ended - float(moment.read_text())
    row = {"fault": fault, "launcher": launcher, "seconds": seconds, "exit": done.returncode}
    if fault in FAULTS:
        failure_table.append(row)
    # Of a rank that says that it is done mpiexec may report just that (docs/failures.md).
    assert done.returncode or (fault == "os._exit(0)" and "srun" not in command), output
    assert done.returncode != 124, output
    assert seconds < END_S, output
    for reason in REASONS.get(fault, ()):
        assert reason in done.stderr
    if fault == "hang":
        assert_rank_2_shows_where_it_is(done.stderr)
    if fault.startswith("hang, buffers"):
        assert_the_others_show_where_they_are(done.stderr)
        own = lines_of(done.stderr, 2)
        assert own.startswith(SENTENCE if fault == "hang, buffers" else ""), output
        assert ("in hang\n" in own) == (fault == "hang, buffers"), output
    if fault.endswith("SIGSTOP"):
        assert "rank 2 of 4" not in done.stderr


def assert_rank_2_shows_where_it_is(said: str) -> None:
    """The others keep their interpreters locked: the first of them that dumps its stacks ends."""
    lines = lines_of(said, 2)
    assert lines.startswith(SENTENCE), said
    assert "in hang\n" in lines, said
    assert re.search(rf" in \[rank [013] of 4\] {SENTENCE}", said), said


def assert_the_others_show_where_they_are(said: str) -> None:
    for rank in (0, 1, 3):
        lines = lines_of(said, rank)
        assert lines.startswith(SENTENCE), said
        assert "in wait_for_the_others\n" in lines, said
        assert "in hang\n" not in lines, said


def lines_of(said: str, rank: int) -> str:
    return "".join(re.findall(rf"^\[rank {rank} of 4\] (.*\n)", said, re.MULTILINE))
