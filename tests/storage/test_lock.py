"""One job at a time writes: locks of processes that live, died, stopped, or run elsewhere."""

import fcntl
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tilenet.errors import TilenetError
from tilenet.storage import lock as module
from tilenet.storage.lock import Lock

HOLD = """
import sys
from pathlib import Path
from tilenet.storage.lock import Lock
with Lock(Path(sys.argv[1]), "the run's folder out", print):
    print("held", flush=True)
    sys.stdin.read()
"""
COUNT = """
import sys
from pathlib import Path
from tilenet.storage.lock import Lock
counter = Path(sys.argv[1] + ".counter")
for _ in range(int(sys.argv[2])):
    with Lock(Path(sys.argv[1]), "a counter", print):
        number = int(counter.read_text())
        counter.write_text(str(number + 1))
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDING_SECONDS", 0.3)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(module, "DEAD_SECONDS", 0.5)


@pytest.fixture
def take(tmp_path: Path) -> Iterator[Callable[..., Lock]]:
    """Take the lock of a folder; given back at the end."""
    with ExitStack() as stack:
        yield lambda say=print: stack.enter_context(Lock(tmp_path / ".lock", "the map m.tif", say))


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


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process run on another machine, whose `flock` does not reach the first."""
    kernel = f"another than {module._kernel()}"
    monkeypatch.setattr(module, "_kernel", lambda: kernel)
    monkeypatch.setattr(module, "_flock", lambda file: "ours")


def test_a_second_process_is_told_who_holds_the_lock_and_since_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take: Callable[..., Lock]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "8641")
    with holding(tmp_path / ".lock") as other:
        since = json.loads((tmp_path / ".lock").read_text())["since"]
        with pytest.raises(TilenetError) as refused:
            take()
        # Also where the first was stopped: it may go on at any time.
        other.send_signal(signal.SIGSTOP)
        with pytest.raises(TilenetError):
            take()
    assert str(refused.value) == (
        f"one job at a time writes the map m.tif (process {other.pid} on host {platform.node()}, "
        f"job 8641 has written it since {since}); wait for its end, stop it, or choose another "
        "place"
    )


def test_a_lock_is_free_once_its_process_ends_however_it_ends(
    tmp_path: Path, take: Callable[..., Lock]
) -> None:
    path = tmp_path / ".lock"
    with holding(path) as other:
        other.kill()
        other.wait()
        assert path.exists()
        said: list[str] = []
        take(said.append).release()
        assert said == []  # nothing is waited for
        assert os.listdir(tmp_path) == []
    with holding(path) as other:
        assert other.communicate("") == ("", None)
    assert os.listdir(tmp_path) == []


def test_a_process_that_is_ending_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take: Callable[..., Lock]
) -> None:
    monkeypatch.setattr(module, "ENDING_SECONDS", 60)
    with holding(tmp_path / ".lock") as other:
        end = threading.Timer(0.2, other.kill)
        end.start()
        take()
        assert other.wait() == -signal.SIGKILL


def test_a_job_on_another_machine_that_lives_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take: Callable[..., Lock]
) -> None:
    first, said = take(), []
    elsewhere(monkeypatch)
    with pytest.raises(TilenetError, match=rf"process {os.getpid()} on host .* has written it"):
        take(said.append)
    assert re.search(r"has not given back the map m.tif: waiting \d+ s to see whether", said[0])
    first.check()
    assert not first.lost


def test_a_job_on_another_machine_that_died_is_waited_for_and_then_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take: Callable[..., Lock]
) -> None:
    with holding(tmp_path / ".lock") as other:
        other.kill()
    elsewhere(monkeypatch)
    began = time.monotonic()
    second = take()
    assert time.monotonic() - began >= module.DEAD_SECONDS
    second.check()


def test_a_job_that_was_replaced_notices_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take: Callable[..., Lock]
) -> None:
    monkeypatch.setattr(module, "BEAT_SECONDS", 60.0)  # as when the process is stopped
    first = take()
    first.check()
    elsewhere(monkeypatch)
    second = take()
    with pytest.raises(TilenetError, match=r"has taken over: this one gave no sign of life"):
        first.check()
    assert first.lost
    second.check()
    first.release()
    second.check()
    assert (tmp_path / ".lock").exists()  # the other's
    second.release()
    assert not (tmp_path / ".lock").exists()


def test_heartbeats_notice_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take: Callable[..., Lock]
) -> None:
    first = take()
    (tmp_path / ".lock").unlink()
    elsewhere(monkeypatch)
    second = take()
    until = time.monotonic() + 60
    while not first.lost and time.monotonic() < until:
        time.sleep(0.01)
    assert first.lost
    assert not second.lost


def test_a_deleted_lock_file_alone_ends_nothing(tmp_path: Path, take: Callable[..., Lock]) -> None:
    lock = take()
    (tmp_path / ".lock").unlink()
    lock.check()
    assert not lock.lost


def test_where_a_file_system_has_no_locks_heartbeats_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take: Callable[..., Lock]
) -> None:
    def unknown(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unknown)
    first = take()
    with pytest.raises(TilenetError, match=r"has written it since \d{4}-"):
        take()
    monkeypatch.setattr(os, "utime", lambda path: None)  # no beat any more
    take().check()
    with pytest.raises(TilenetError, match="has taken over"):
        first.check()


def test_processes_that_take_turns_lose_no_update(tmp_path: Path) -> None:
    path, turns = tmp_path / ".lock", 15
    (tmp_path / ".lock.counter").write_text("0")
    words = [sys.executable, "-c", COUNT, str(path), str(turns)]
    processes = [subprocess.Popen(words) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert (tmp_path / ".lock.counter").read_text() == str(3 * turns)
    assert not path.exists()


@pytest.mark.parametrize("what", ["folder", "link", "garbage"])
def test_strange_lock_files(tmp_path: Path, take: Callable[..., Lock], what: str) -> None:
    path, precious = tmp_path / ".lock", tmp_path / "precious"
    precious.write_text("text")
    if what == "garbage":
        path.write_bytes(b'["\xff')
        take().release()
        return
    if what == "folder":
        path.mkdir()
    else:
        path.symlink_to(precious)
    with pytest.raises(TilenetError, match=r"the map m.tif needs a lock file that can be written"):
        take()
    assert precious.read_text() == "text"
