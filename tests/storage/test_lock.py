"""One job at a time writes: locks of processes that live, died, or run elsewhere."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tilenet.errors import TilenetError
from tilenet.storage import lock as module
from tilenet.storage.lock import Lock

HOLD = """
import sys
from pathlib import Path
from tilenet.storage.lock import Lock
with Lock(Path(sys.argv[1]), "the run's folder out"):
    print("held", flush=True)
    sys.stdin.read()
"""
# Each leaves the lock of a dead process, so that the next one takes it over.
COUNT = """
import json, sys
from pathlib import Path
from tilenet.storage.lock import Lock
path, counter = Path(sys.argv[1]), Path(sys.argv[1] + ".counter")
for _ in range(int(sys.argv[2])):
    with Lock(path, "a counter") as lock:
        counter.write_text(str(int(counter.read_text()) + 1))
        path.write_text(json.dumps(lock._record | {"started": "never"}) + "\\n")
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDING_SECONDS", 0.3)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "LSB_JOBINDEX"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".lock"


def take(path: Path) -> Lock:
    return Lock(path, "the map m.tif")


@contextmanager
def holding(path: Path) -> "Iterator[subprocess.Popen[str]]":
    """Another process that holds the lock."""
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def change(path: Path, **values: Any) -> None:
    """Let another process have written the lock file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_second_process_is_told_who_holds_the_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "8641")
    with holding(path) as other:
        record = json.loads(path.read_text())
        # Also where the first was stopped, and though the job is the same: it may continue.
        for signum in (signal.SIGCONT, signal.SIGSTOP):
            other.send_signal(signum)
            with pytest.raises(TilenetError) as refused:
                take(path)
            assert str(refused.value) == (
                f"one job at a time writes the map m.tif (process {other.pid} on host "
                f"{record['host']}, job 8641 has written it since {record['since']}); wait for its "
                f"end, or delete {path} if it no longer runs"
            )


def test_a_lock_is_free_once_its_process_ends_however_it_ends(path: Path) -> None:
    with holding(path) as other:
        other.kill()  # not waited for: a zombie is dead
        take(path).release()
        assert not path.exists()
    with holding(path) as other:
        assert other.communicate("") == ("", None)
    assert os.listdir(path.parent) == []


def test_a_process_that_is_ending_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ENDING_SECONDS", 60)
    with holding(path) as other:
        threading.Timer(0.2, other.kill).start()
        take(path)
        assert other.wait() == -signal.SIGKILL


def test_another_process_under_the_number_of_a_dead_one_holds_nothing(path: Path) -> None:
    take(path)
    change(path, started="12345")
    take(path).check()


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7"}, True),
        ({"PBS_JOBID": "7[2].pbs"}, {"PBS_JOBID": "7[2].pbs"}, True),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "2"}, {"LSB_JOBID": "7", "LSB_JOBINDEX": "2"}, True),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "2"}, {"LSB_JOBID": "7", "LSB_JOBINDEX": "3"}, False),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8"}, False),
        ({"SLURM_JOB_ID": "7"}, {}, False),
        ({}, {}, False),
    ],
)
def test_on_another_machine_only_the_same_job_takes_over(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: dict[str, str],
    now: dict[str, str],
    same: bool,
) -> None:
    with monkeypatch.context() as first:
        for name, value in before.items():
            first.setenv(name, value)
        old = take(path)
    for name, value in now.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "_kernel", lambda: "another")
    monkeypatch.setattr(module, "ENDING_SECONDS", 0.3 if not same else 0)  # at once
    if not same:
        with pytest.raises(TilenetError, match=rf"or delete {re.escape(str(path))} if it no long"):
            take(path)
        old.check()
        path.unlink()
    new = take(path)
    with pytest.raises(TilenetError, match=r"one job at a time .* this one ends"):
        old.check()
    old.release()
    new.check()
    new.release()
    assert os.listdir(path.parent) == []


def test_a_deleted_lock_file_alone_ends_nothing(path: Path) -> None:
    lock = take(path)
    path.unlink()
    lock.check()
    assert not lock.lost


def test_processes_that_take_turns_lose_no_update(path: Path) -> None:
    turns, counter = 15, Path(f"{path}.counter")
    counter.write_text("0")
    words = [sys.executable, "-c", COUNT, str(path), str(turns)]
    processes = [subprocess.Popen(words) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert counter.read_text() == str(3 * turns)


def test_a_takeover_that_was_killed_is_cleared_away_with_the_lock_file(path: Path) -> None:
    take(path)
    change(path, started="12345")
    (path.parent / ".lock.next").write_text("")
    with pytest.raises(TilenetError, match="or delete"):
        take(path)
    path.unlink()
    take(path).release()
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("what", ["folder", "link", "garbage"])
def test_strange_lock_files(path: Path, what: str) -> None:
    precious = path.parent / "precious"
    precious.write_text("text")
    if what == "folder":
        path.mkdir()
    elif what == "link":
        path.symlink_to(precious)
    else:
        path.write_bytes(b'["\xff')
    with pytest.raises(TilenetError, match=r"one job at a time .*its lock file does not say which"):
        take(path)
    assert precious.read_text() == "text"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(TilenetError, match=r"the map m.tif needs a lock file that can be written"):
        take(tmp_path / "missing" / ".lock")


def test_a_process_that_was_killed_while_it_took_over_is_no_hindrance(path: Path) -> None:
    with holding(path) as other:
        other.kill()
    following = path.with_name(f"{path.name}.next")
    following.write_bytes(path.read_bytes())  # also of a dead process
    take(path).release()
    assert os.listdir(path.parent) == []


def test_a_lock_is_whole_or_not_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", killed)
        with pytest.raises(KeyError):
            take(path)
    assert not path.exists()
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no links")))
        with take(path), pytest.raises(TilenetError, match="one job at a time"):
            take(path)
