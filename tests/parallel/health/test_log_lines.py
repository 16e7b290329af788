"""In a log progress is lines with the time of day, a few of them."""

import re
import time
from collections.abc import Callable

import pytest
from mpi4py import MPI
from tqdm import tqdm

from tilenet.parallel.health import progress
from tilenet.parallel.health.progress import progress_bar, say

CLOCK = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


@pytest.fixture
def tick(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let seconds pass."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    return pass_by


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    said = capsys.readouterr().err.splitlines()
    assert all(re.match(CLOCK, line) for line in said)
    return [re.sub(CLOCK, "", line) for line in said]


def test_a_line_every_half_minute_and_one_at_the_end(
    capsys: pytest.CaptureFixture[str], tick: Callable[[float], None]
) -> None:
    with progress_bar(MPI.COMM_SELF, 1000, "step", 100, what="a\nrun") as bar:
        for step in range(100, 1000):
            tick(0.25)
            bar.set_postfix({"loss": f"{step}", "Mpx/s": "7"}, refresh=False)
            bar.update()
        found = lines(capsys)
        assert len(found) == 900 * 0.25 // 30
        assert found[0] == "a\\nrun: 220 of 1000 steps, 0:03:15 left, loss 219, Mpx/s 7"
    assert lines(capsys) == ["a\\nrun: 1000 of 1000 steps, in 0:03:45, loss 999, Mpx/s 7"]


def test_a_part_that_takes_no_time_says_nothing(
    capsys: pytest.CaptureFixture[str], tick: Callable[[float], None]
) -> None:
    for seconds, count in ((29.0, 0), (31.0, 1)):
        with progress_bar(MPI.COMM_SELF, 7, "tile", brief=True) as bar:
            bar.set_postfix_str("12 Mpx/s", refresh=False)
            bar.update(3)
            tick(seconds)
            bar.update(2)
        found = lines(capsys)
        assert found == ["5 of 7 tiles, 0:00:12 left, 12 Mpx/s"] * count


def test_sentences_and_lines_do_not_mix(
    capsys: pytest.CaptureFixture[str], tick: Callable[[float], None]
) -> None:
    with progress_bar(MPI.COMM_SELF, 2, "strip") as bar:
        bar.update()
        say("a sentence")
    assert capsys.readouterr().err.splitlines()[0] == "a sentence"


def test_terminals_have_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    with progress_bar(MPI.COMM_SELF, 2, "strip") as bar:
        assert isinstance(bar, tqdm)
