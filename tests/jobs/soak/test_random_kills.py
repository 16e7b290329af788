"""Kills at random, in a run of steady and one of changing ranks; `make soak` does hundreds."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from disturbances import KINDS, MOMENTS, TOUCHES_NO_RANK, choose

ROOT = Path(__file__).parents[3]
LIMIT_S = 1000  # it takes 60 on two idle cores


@pytest.mark.alone
def test_a_run_that_is_killed_at_random_loses_nothing() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "bench", "soak", "--quick", "--seed", "140"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=ROOT,
    )
    assert ended.stdout.count("holds: faults (0, goal 0)") == 1, ended.stdout + ended.stderr
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout.splitlines()[-1])["figures"]["launchers"]["mpiexec"]
    assert sum(seen["kills"].values()) >= 5  # of 10 some come too late, where a life is quick
    assert seen["faults"] == []
    assert seen["runs equal to the last bit"] == seen["runs on changing ranks"] == 1


def test_a_seed_tells_what_is_done_and_all_is_done_some_time() -> None:
    assert choose("7", "train", None) == choose("7", "train", None)
    assert choose("7", "train", None) != choose("8", "train", None)
    for phase, moments in MOMENTS.items():
        lives = [choose(f"{phase}{i}", phase, None) for i in range(600)]
        seen = [life.disturbance for life in lives if life.disturbance is not None]
        assert {life.ranks for life in lives} == {1, 2, 3, 4}
        assert {one.kind for one in seen} == set(KINDS)
        assert {one.moment.after for one in seen} == set(moments)
        often = Counter(one.kind for one in seen)
        assert often["kill -9 of a rank"] > often["SIGSTOP"]
        for life, one in zip(lives, seen, strict=True):
            assert (one.rank is None) == (one.kind in TOUCHES_NO_RANK)
            assert one.rank is None or one.rank < life.ranks
            assert one.kind != "SIGSTOP" or life.ranks > 1
            _, most, seconds = moments[one.moment.after]
            assert 1 <= one.moment.count <= most
            assert 0 <= one.moment.seconds <= seconds
    assert {choose(str(i), "map", 3).ranks for i in range(50)} == {3}
    assert {choose(str(i), "map", None, 2).ranks for i in range(50)} == {1, 2}


def test_the_table_of_kills_is_the_one_that_was_measured() -> None:
    text = (ROOT / "docs" / "failures.md").read_text().split("\n## Killed at random\n")[1]
    lines = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("|")]
    measured = json.loads((ROOT / "bench" / "results" / "soak.json").read_text())["figures"]
    seen = measured["launchers"]
    wanted = {(kind, *(_cell(one, kind) for one in seen.values())) for kind in KINDS}
    assert {tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines[2:]} == wanted


def _cell(seen: dict[str, dict[str, dict[str, int]]], kind: str) -> str:
    codes = seen["exits"].get(kind, {})
    return f"{seen['kills'][kind]} times: {', '.join(codes)}" if codes else "–"
