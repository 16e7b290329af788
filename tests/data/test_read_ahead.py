"""Reading ahead: the same results in the same order, bounded, and nothing left behind."""

import contextlib
import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tilenet.data.rasters.raster import Raster
from tilenet.data.read_ahead import ReadAhead
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window

Write = Callable[..., str]


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "reader"]


@pytest.mark.parametrize("ahead", [0, 1, 3, 50])
def test_results_come_in_order(ahead: int) -> None:
    where = set()

    def read(number: int) -> int:
        where.add(threading.current_thread().name)
        return number * number

    with ReadAhead(read, (n for n in range(7, 30)), ahead) as reads:
        assert list(reads) == [n * n for n in range(7, 30)]
        with pytest.raises(StopIteration):
            next(reads)
    assert where == {"reader" if ahead else threading.current_thread().name}
    assert readers() == []


@pytest.mark.parametrize("ahead", [1, 3])
def test_so_many_are_made_before_they_are_asked_for_and_no_more(ahead: int) -> None:
    began: list[int] = []
    more = threading.Semaphore(0)

    def read(number: int) -> int:
        began.append(number)
        more.release()
        return number

    with ReadAhead(read, range(100), ahead) as reads:
        for taken in range(3):
            for _ in range(1 if taken else ahead):
                assert more.acquire(timeout=30)
            time.sleep(0.05)  # in which one too many would begin
            assert began == list(range(ahead + taken))
            assert next(reads) == taken


def test_without_a_thread_nothing_is_made_before_it_is_asked_for() -> None:
    began: list[int] = []
    reads = ReadAhead(lambda n: began.append(n) or n, range(9), 0)
    assert began == []
    assert [next(reads), next(reads)] == began == [0, 1]


@pytest.mark.parametrize("kind", [TilenetError, KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_an_error_is_raised_where_its_result_would_have_been(
    kind: type[BaseException], ahead: int
) -> None:
    broken = kind("the third")

    def read(number: int) -> int:
        if number == 3:
            raise broken
        return number

    with ReadAhead(read, range(9), ahead) as reads:
        assert [next(reads) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(kind) as caught:
            next(reads)
        assert caught.value is broken
    assert readers() == []


def test_ctrl_c_at_any_moment_leaves_no_thread_that_waits() -> None:
    """Of a semaphore, which is Python, Ctrl-C in the middle of a release loses the wake-up."""
    random, came = np.random.default_rng(6), []

    def press(number: int, frame: object) -> None:
        came.append(number)
        signal.setitimer(signal.ITIMER_REAL, 20)  # the end of the round, if it hangs
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, press)
    try:
        for _ in range(400):
            came.clear()
            ahead = ReadAhead(lambda n: n, range(10**9), 2)
            with contextlib.suppress(KeyboardInterrupt), ahead as reads:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 3e-3))
                for _ in reads:
                    pass
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert len(came) == 1, "the reader waited"
            assert readers() == []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_error_of_what_is_to_be_read_is_raised_too() -> None:
    def items() -> Iterator[int]:
        yield 5
        raise TilenetError("no more")

    with ReadAhead(lambda n: n, items(), 2) as reads:
        assert next(reads) == 5
        with pytest.raises(TilenetError, match="no more"):
            next(reads)


def test_leaving_early_waits_for_the_thread_and_drops_what_waits() -> None:
    made: list[weakref.ref[threading.Event]] = []
    inside, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def read(number: int) -> threading.Event:
        if number == 2:
            inside.set()
            assert go_on.wait(30)
            ended.set()
        result = threading.Event()
        made.append(weakref.ref(result))
        return result

    reads = ReadAhead(read, range(100), 3)
    assert inside.wait(30)
    threading.Timer(0.1, go_on.set).start()
    reads.close()
    assert ended.is_set(), "left while the thread was reading"
    assert readers() == []
    gc.collect()
    assert len(made) == 3
    assert [ref() for ref in made] == [None] * 3
    assert list(reads) == []


def test_threads_take_turns_in_reading_files(
    write_raster: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, most = [0], [0]
    path = write_raster("a.tif", np.arange(81, dtype=np.uint8).reshape(9, 9))
    original = Raster._read_inside

    def slow(self: Raster, window: Window) -> object:
        now[0] += 1
        most[0] = max(most[0], now[0])
        time.sleep(0.01)
        found = original(self, window)
        now[0] -= 1
        return found

    monkeypatch.setattr(Raster, "_read_inside", slow)
    with Raster(path) as raster:
        threads = [threading.Thread(target=raster.read, args=(raster.whole,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [1]


PROGRAM = """
import os, sys
from tilenet.__main__ import main
from tilenet.training.step import Step

original = Step.take

def breaks(self, step, *rest):
    if step == 3 and self.comm.rank == self.comm.size - 1:
        os.truncate({image!r}, 3000)
    return original(self, step, *rest)

Step.take = breaks
sys.exit(main(["train", *{arguments!r}]))
"""


def test_a_file_that_breaks_later_ends_the_job_in_a_sentence(
    tmp_path: Path, write_raster: Write
) -> None:
    ranks = 3
    rng = np.random.default_rng(2)
    image = write_raster("image.tif", rng.integers(1, 999, (2, 90, 120)).astype(np.uint16))
    labels = write_raster("labels.tif", rng.integers(0, 3, (90, 120)).astype(np.uint8))
    arguments = [
        *("--images", image, "--labels", labels, "--classes", "3", "--steps", "40"),
        *("--network.poolings", "2", "--network.base", "2", "--device", "cpu"),
        *("--output", str(tmp_path / "run"), "--read_ahead", "2"),
        *("--tiles.rows", "3", "--tiles.columns", "2"),
    ]
    program = textwrap.dedent(PROGRAM).format(image=image, arguments=arguments)
    ended = subprocess.run(
        ["mpiexec", "-genv", "GDAL_CACHEMAX", "0", "-n", str(ranks), sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode != 0
    # Each rank that comes upon it may say so before the job ends.
    assert 1 <= ended.stderr.count("a raster must be readable everywhere") <= ranks
    assert "Traceback" not in ended.stderr
    assert len((tmp_path / "run" / "history.csv").read_text().splitlines()) in (4, 5)
