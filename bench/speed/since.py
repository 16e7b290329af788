"""Today's code beside that of an older commit: training, mapping, exchange and sums, in turns.

    python -m bench.speed.since [--quick] [--commit 20cd807]

The commit is checked out beside its repository for the time of the bench. Both codes then take
turns, on 2 ranks of one thread: the demo's training on a scene of 2048² and its map, as whole
commands; and what `exchange.py` and `reduction.py` of each code measure of a step that exchanges
halos and of a sum of gradients. Of the turns the least counts: what disturbs a machine only adds.
--quick: fewer turns, a scene of 1024².
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.report import ROOT, Claim, at_most, report

COMMIT = "20cd807"  # before the house was put in order
RANKS = 2
NETWORK = "72 million"  # of reduction.py
GOAL = 1.05


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A work tree of a commit, gone afterwards."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(root), commit], check=True)
        try:
            yield root
        finally:
            subprocess.run([*git, "remove", "--force", str(root)], check=True)


def on_ranks(root: Path, *arguments: str) -> str:
    """Run Python on the ranks with a tree's code; return what was printed.

    Raises:
        RuntimeError: It failed; with what it said.
    """
    ended = subprocess.run(
        ["mpiexec", "-n", str(RANKS), sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed in {root}:\n{ended.stderr}")
    return ended.stdout


def bench_file(root: Path, name: str) -> str:
    """The path of a bench about speed, wherever that tree has it."""
    return str(next(root.glob(f"bench/**/{name}.py")))


def take_turn(root: Path, scene: Path, steps: int, side_px: int) -> dict[str, float]:
    """Seconds of everything, once, with a tree's code."""
    found = {}
    with tempfile.TemporaryDirectory(dir=scene) as place:
        run = Path(place) / "run"
        files = {"images": scene / "scene.tif", "labels": scene / "labels_train.tif", "output": run}
        options = [f"--steps={steps}", *(f"--{name}={path}" for name, path in files.items())]
        began = time.perf_counter()
        on_ranks(root, "-m", "tilenet", "train", "-c", "demo/run.yaml", *options)
        found["training, the whole command"] = time.perf_counter() - began
        with (run / "history.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        found["training, a step"] = median(float(row["seconds"]) for row in rows)
        took = []
        for number in range(3):  # it is short
            began = time.perf_counter()
            target = str(Path(place) / f"map{number}.tif")
            on_ranks(root, "-m", "tilenet", "predict", str(run), str(scene / "scene.tif"), target)
            took.append(time.perf_counter() - began)
        found["mapping, the whole command"] = min(took)
    printed = on_ranks(root, bench_file(root, "exchange"), "--measure", str(side_px), "5")
    for row in json.loads(printed.splitlines()[-1]):
        if row["way"] == "exchange":
            found[f"a step that exchanges halos, norm {row['norm']}"] = row["seconds"]
    printed = on_ranks(root, bench_file(root, "reduction"), "--measure", NETWORK, "ours", "7")
    found[f"a sum of {NETWORK} gradients"] = min(json.loads(printed.splitlines()[-1]))
    return found


def claims(seconds: dict[str, dict[str, list[float]]]) -> list[Claim]:
    """That nothing is slower."""
    return [
        at_most(
            f"{what}: seconds of today over then",
            min(both["now"]) / min(both["then"]),
            GOAL,
        )
        for what, both in seconds.items()
    ]


def main() -> None:
    """Take turns, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--commit", default=COMMIT)
    given = parser.parse_args()
    size, steps, side_px, turns = (1024, 40, 512, 3) if given.quick else (2048, 200, 512, 4)
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"then": [], "now": []})
    with checked_out(given.commit) as older, tempfile.TemporaryDirectory() as place:
        make = [sys.executable, "demo/make_scene.py", place, "--size", str(size)]
        subprocess.run(make, cwd=ROOT, check=True)
        trees = {"then": older, "now": ROOT}
        for turn in range(turns):
            for when, root in trees.items() if turn % 2 else reversed(trees.items()):
                for what, took in take_turn(root, Path(place), steps, side_px).items():
                    seconds[what][when].append(took)
    figures: dict[str, Any] = {
        "commit": given.commit,
        "ranks": RANKS,
        "size_px": size,
        "turns": turns,
        "seconds": [
            {"what": what, **{when: min(some) for when, some in both.items()}}
            for what, both in seconds.items()
        ],
    }
    report("since", figures, claims(seconds))


if __name__ == "__main__":
    main()
