"""Every test here runs on all ranks of the job; files that tests share are written by rank 0."""

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from mpi4py import MPI

from tilenet import train as run_account

BARRIER = MPI.COMM_WORLD.Dup()  # the tests' own messages cannot match it
ALONE_SECONDS = 10  # a rank that failed waits for the others so long
FAILED = pytest.StashKey[str]()


def pytest_report_header() -> str:
    return f"{MPI.Get_library_version().splitlines()[0]}, {MPI.COMM_WORLD.size} ranks"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that say on how many ranks they tell something new."""
    left_out = [
        item
        for item in items
        if (mark := item.get_closest_marker("ranks")) and MPI.COMM_WORLD.size not in mark.args
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call" and report.failed:
        item.stash[FAILED] = f"{item.nodeid}\n{report.longreprtext}"
    return report


@pytest.fixture(autouse=True)
def no_report(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write no report, which takes longer than a small run, unless a test is marked so."""
    if not request.node.get_closest_marker("report"):
        monkeypatch.setattr(run_account, "try_report", lambda folder, maps: None)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Signals are caught as before: after a stop they are kept from the process, which ends."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGUSR1, signal.SIGTERM)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Iterator[MPI.Intracomm]:
    """All ranks; no test begins before all have ended the one before."""
    _meet(request.node)
    yield MPI.COMM_WORLD
    _meet(request.node)


def _meet(item: pytest.Item) -> None:
    """Wait for all ranks; one whose test failed, while others wait for its messages, ends all."""
    met, began = BARRIER.Ibarrier(), time.monotonic()
    while not met.Test():
        failed = item.stash.get(FAILED, None)
        if failed and time.monotonic() - began > ALONE_SECONDS:
            capture = item.config.pluginmanager.getplugin("capturemanager")
            with capture.global_and_fixture_disabled():
                print(f"[rank {BARRIER.rank} of {BARRIER.size}] {failed}", file=sys.stderr)
                sys.stderr.flush()
                BARRIER.Abort(1)
        if time.monotonic() - began > 0.01:
            time.sleep(0.001)  # ranks share cores


@pytest.fixture
def shared_path(comm: MPI.Intracomm, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty folder that all ranks see."""
    path = Path(comm.bcast(tempfile.mkdtemp(prefix="tilenet-") if comm.rank == 0 else None))
    yield path
    _meet(request.node)
    if comm.rank == 0:
        shutil.rmtree(path)
