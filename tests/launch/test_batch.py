"""What a job script's program decides, and how it comes again, without any ranks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.batch import AGAIN, ending, main
from launch.lives import holds_step, in_order
from launch.queues import Queue, preempted, requeues
from launch.rank import status_of
from launch.steps import Outcome, Steps, outcome, starts_again
from launch.stop_signals import StopSignals

RUNS = "JobId=7 JobName=x JobState=RUNNING Reason=None PreemptTime=None "
ROOM, END = StopSignals(requeue=True), StopSignals(cancel=True)


@pytest.mark.parametrize(
    ("status", "started", "requeue", "result"),
    [
        ("", True, False, "killed"),
        ("began\n", True, True, "killed"),
        ("began\n0\n", True, True, "finished"),
        ("began\n75\n", True, False, "stopped"),
        ("began\n3\n75\n", True, True, "failed"),
        ("began\n137\n0\n", True, False, "failed"),
        ("began\n134\n", False, False, "failed"),
        ("began\n134\n", False, True, "stopped"),
    ],
)
def test_what_ranks_write_says_how_a_step_ended(
    status: str, started: bool, requeue: bool, result: str
) -> None:
    assert outcome(status, started, requeue) == Outcome(result, started)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "stop", "rank", "words", "exits"),
    [
        (0, False, 0, "0\n", 0),
        (0, True, 1, "", 0),
        (75, False, 0, "75\n", 0),
        (75, False, 1, "", 0),
        (3, True, 1, "3\n", 3),
        (-signal.SIGKILL, True, 1, "137\n", 137),
        (-signal.SIGUSR1, True, 0, "75\n", 0),
        (143, True, 1, "", 0),  # by a shell in between
        (-signal.SIGTERM, False, 0, "143\n", 143),
    ],
)
def test_a_rank_tells_a_stop_from_a_failure(
    code: int, stop: bool, rank: int, words: str, exits: int
) -> None:
    assert status_of(code, stop, rank) == (words, exits)


@pytest.mark.parametrize(
    ("result", "stop", "preempted", "train", "last"),
    [
        ("failed", ROOM, True, 1, 1),
        ("finished", StopSignals(), False, None, 0),
        ("finished", ROOM, False, AGAIN, 0),
        ("finished", END, False, 143, 0),
        ("stopped", StopSignals(), False, AGAIN, AGAIN),  # a user told the ranks; the queue decides
        ("stopped", ROOM, False, AGAIN, AGAIN),
        ("stopped", StopSignals(requeue=True, cancel=True), False, 143, 143),
        ("killed", StopSignals(), False, 1, 1),
        ("killed", StopSignals(), True, AGAIN, AGAIN),
        ("killed", ROOM, False, AGAIN, AGAIN),
        ("killed", END, False, 143, 143),
    ],
)
def test_a_job_ends_goes_on_or_comes_again(
    result: str, stop: StopSignals, preempted: bool, train: int | None, last: int
) -> None:
    ended = Outcome(result, started=True)  # type: ignore[arg-type]
    assert ending(ended, stop, lambda: preempted) == train
    assert ending(ended, stop, lambda: preempted, last=True) == last


@pytest.mark.parametrize(
    ("ended", "stop", "unstarted", "again"),
    [
        (Outcome("failed", started=False), StopSignals(), 0, True),
        (Outcome("killed", started=False), StopSignals(), 1, True),
        (Outcome("failed", started=False), StopSignals(), 2, False),
        (Outcome("failed", started=True), StopSignals(), 0, False),
        (Outcome("finished", started=False), StopSignals(), 0, False),
        (Outcome("failed", started=False), END, 0, False),
    ],
)
def test_a_step_runs_again_where_mpi_did_not_start(
    ended: Outcome, stop: StopSignals, unstarted: int, again: bool
) -> None:
    assert starts_again(ended, stop, unstarted) == again


def test_slurm_queues_a_job_again_that_makes_room_and_still_runs() -> None:
    others = RUNS.replace("PreemptTime=None", "PreemptTime=2024-01-01T00:00:00")
    assert (preempted(RUNS), preempted(others), preempted("")) == (False, True, False)
    assert requeues(RUNS, requeue=True)
    assert requeues(others, requeue=False)
    assert not requeues(RUNS, requeue=False), "the user stopped the ranks"
    assert not requeues(RUNS.replace("RUNNING", "CANCELLED"), requeue=True)
    assert not requeues("", requeue=True), "Slurm does not answer"


def test_slurm_holds_a_step_that_is_neither_its_own_nor_the_watch() -> None:
    free = "7.batch batch\n7.extern extern\n7.3 watch\n"
    assert not holds_step(free)
    assert not holds_step("")
    assert holds_step(f"{free}7.4 python\n")


def test_nodes_are_in_the_order_of_their_numbers() -> None:
    assert in_order(["n10", "n9", "m2", "n100"]) == ["m2", "n9", "n10", "n100"]


def test_what_cannot_run_is_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(StopSignals, "listen", lambda self: None)  # pytest's own signals stay
    run = ["--run=run.yaml", "--plan=plan.json", f"--output={tmp_path}/out"]
    (tmp_path / "file").touch()
    (tmp_path / "out" / "map-i.image").mkdir(parents=True)
    for arguments, words in (
        (run, "what starts the ranks must follow --"),
        ([*run, "--run=", "--", "true"], "give RUN or IMAGE"),
        ([*run, "--nodes", "1", "2", "--", "true"], "submit it with sbatch"),
        ([*run, "--", "no such launcher"], "(no such launcher: No such file or directory); mend"),
        ([*run, f"--output={tmp_path}/file/out", "--", "true"], "file/out: Not a directory); mend"),
        ([*run, "--output=/proc", "--", "true"], " writes in its output folder (/proc/status."),
        ([*run, "--run=", "--image=i.tif", "--", "true"], "map-i.image: Is a directory); mend"),
        ([*run, "--stage", "a", "--once-per-node=false", "--", "true"], "the nodes' storage"),
    ):
        assert main(arguments) == 1
        error = capfd.readouterr().err
        assert error.startswith("tilenet: ")
        assert error.count("\n") == 1
        assert words in error
        assert "Errno" not in error


@pytest.fixture
def staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of LSF's job 7, which stages; its ranks log their folder and what lies there."""
    monkeypatch.setattr(StopSignals, "listen", lambda self: None)
    monkeypatch.chdir(tmp_path)
    Path("i.tif").write_text("pixels")
    for name, value in (("LOG", f"{tmp_path}/log"), ("CODE", "0"), ("LSB_JOBID", "7")):
        monkeypatch.setenv(name, value)
    program = "sh -c 'pwd >> $LOG; ls >> $LOG; touch $TILENET_STARTED; eval $ALSO; exit $CODE'"
    job = ["--run=run.yaml", "--plan=plan.json", "--output=out", f"--program={program}"]
    return [*job, "--scheduler=lsf", f"--storage={tmp_path}/disk"]


def staged() -> list[Path]:
    return list(Path("disk").glob("*/tilenet-staged-*"))


def test_jobs_stage_in_folders_of_their_own_and_delete_them(
    staging: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []
    for number, output, code in (("7", "a", 75), ("7", "a", 0), ("8", "a", 1), ("7", "b", 0)):
        monkeypatch.setenv("LSB_JOBID", number)
        monkeypatch.setenv("CODE", str(code))
        assert main([*staging, f"--output={output}", "--stage", "i.tif", "--", "env"]) == code
        folder, *files = Path("log").read_text().split()
        Path("log").unlink()
        assert files == ["i.tif"]
        assert not Path(folder).exists()
        Path(folder).mkdir()
        Path(folder, "more.tif").touch()  # of a life that was killed
        folders.append(folder)
    assert folders[0] == folders[1]
    assert len(set(folders)) == 3


def test_what_was_staged_is_deleted_however_the_job_ends(
    staging: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*staging, "--stage", "i.tif", "missing.tif", "--", "env"]) == 1
    assert "must reach the nodes' storage" in capfd.readouterr().err
    assert staged() == []
    assert main([*staging, "--stage", "i.tif", "--", "no such launcher"]) == 1
    assert staged() == []
    monkeypatch.setattr(Steps, "attempts", lambda *_: sys.exit(3))  # as Lives does
    with pytest.raises(SystemExit):
        main([*staging, "--stage", "i.tif", "--", "env"])
    assert staged() == []


def test_a_job_whose_files_cannot_be_deleted_ends_as_it_would(
    staging: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = tmp_path / "once"
    once.write_text('#!/bin/sh\nexec "$@"\n')
    once.chmod(0o755)
    monkeypatch.setenv("ALSO", f"rm {once}")
    assert main([*staging, f"--once-per-node={once}", "--stage", "i.tif", "--", "env"]) == 0
    assert not once.exists()


def test_a_job_asks_to_come_again_before_it_deletes(
    staging: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODE", "75")
    monkeypatch.setattr(Queue, "come_again", lambda *_: len(staged()))
    assert main([*staging, "--stage", "i.tif", "--", "env"]) == 1
    assert staged() == []


def test_what_killed_jobs_staged_goes_after_a_week_where_nothing_runs_in_it(
    staging: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = tmp_path / "disk" / "me"
    monkeypatch.setenv("USER", "me")
    for name, days in (("old", 7.1), ("young", 6.9), ("runs", 7.1), ("tilenet-1234", 7.1)):
        folder = storage / (name if "-" in name else f"tilenet-staged-{name}")
        folder.mkdir(parents=True)
        (folder / "i.tif").touch()
        os.utime(folder, (time.time() - days * 86400,) * 2)
    (tmp_path / "here" / "out").mkdir(parents=True)
    monkeypatch.chdir("here")
    os.utime(".", (0, 0))  # which the copy would have
    monkeypatch.setenv("ALSO", "find . -maxdepth 0 -mtime -1 >> $LOG")
    with subprocess.Popen(["sleep", "60"], cwd=storage / "tilenet-staged-runs") as runs:
        assert main([*staging, "--stage", ".", "--", "env"]) == 0
        runs.kill()
    assert (tmp_path / "log").read_text().endswith("\nout\n.\n")
    left = {path.name.removeprefix("tilenet-staged-") for path in storage.iterdir()}
    assert left == {"young", "runs", "tilenet-1234"}
