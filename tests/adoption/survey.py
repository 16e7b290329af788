"""What becomes of many generated modules: a table of outcomes, and each failure with its seed.

python tests/adoption/survey.py --from 0 --count 200 [--reduce] [--show] [--ranks 3]
"""

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

import torch
from grammar import WRAPPER, generate
from referee import Outcome, judge, mode_of

__all__ = ["reduced"]

JOB_SECONDS = 60  # without a word


def kind_of(words: str) -> str:
    """A refusal without what is the module's own."""
    reason = words.split(" (")[0]
    place = re.search(r"[(][^()]*?: (\w+)", words)
    return f"{reason[:70]}{f' [{place[1]}]' if place else ''}"


def reduced(seed: int, outcome: Outcome) -> tuple[list[int], Outcome]:
    """Leave out as many steps as the failure survives."""
    without: list[int] = []
    for number in [WRAPPER, *reversed(generate(seed).optional)]:
        other = judge(generate(seed, [*without, number]), mode_of(seed))
        if other.kind == "failed" and other.words == outcome.words:
            without, outcome = [*without, number], other
    return without, outcome


def survey_over_ranks(ranks: int, start: int, count: int) -> None:
    """Start jobs that compare seeds one after another; after one that ends early, the next."""
    here, kinds = Path(__file__).parent, Counter[str]()
    path = [str(here), str(here.parent / "exactness"), str(here.parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    seed, stop = start, start + count
    while seed < stop:
        command = ["mpiexec", "-n", str(ranks), sys.executable, "-m", "mpi4py"]
        command += [str(here / "over_ranks.py"), f"--from={seed}", f"--count={stop - seed}"]
        job = subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert job.stdout is not None
        mode, raised = "", "hang"
        late = threading.Timer(JOB_SECONDS, job.kill)
        late.start()
        for line in job.stdout:
            if re.match(r"\w[\w.]*(Error|Exception)\b", line):
                raised = line.strip()
            if not line.startswith("["):
                continue
            late.cancel()
            late = threading.Timer(JOB_SECONDS, job.kill)
            late.start()
            seed, mode, kind, more = json.loads(line)
            if kind != "begins":
                kinds[f"{mode} {kind}".strip()] += 1
            if kind in ("failed", "refused"):
                print(f"seed {seed} ({mode_of(seed)}, {mode}): {kind} {more}", flush=True)
        late.cancel()
        if job.wait() != 0:
            kinds[f"{mode} ended the job"] += 1
            print(f"seed {seed} ({mode_of(seed)}, {mode}): the job ended: {raised}", flush=True)
        seed += 1
    print(f"{count} modules on {ranks} ranks: {dict(kinds)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--from", type=int, default=0, dest="start")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument(
        "--reduce", action="store_true", help="leave out what is not needed to fail"
    )
    parser.add_argument("--show", action="store_true", help="print each module")
    parser.add_argument("--ranks", type=int, default=0, help="over ranks in both halo modes")
    asked = parser.parse_args()
    if asked.ranks:
        survey_over_ranks(asked.ranks, asked.start, asked.count)
        return
    torch.set_num_threads(1)
    kinds: Counter[str] = Counter()
    words: defaultdict[str, list[int]] = defaultdict(list)
    most: dict[str, float] = {}
    widened, began = [], time.monotonic()
    for seed in range(asked.start, asked.start + asked.count):
        module = generate(seed)
        outcome = judge(module, mode_of(seed))
        kinds[outcome.kind] += 1
        if asked.show:
            print(f"seed {seed}: {outcome.kind} {outcome.words}\n{module.describe()}", flush=True)
        if outcome.kind in ("failed", "no module"):
            print(f"seed {seed} ({mode_of(seed)}): {outcome.words}\n  {outcome.more}", flush=True)
            without: list[int] = []
            if asked.reduce and outcome.kind == "failed":
                without, outcome = reduced(seed, outcome)
            print(generate(seed, without).describe(), flush=True)
        if outcome.kind != "exact":
            name = kind_of(outcome.words) if outcome.kind == "refused" else outcome.words
            words[f"{outcome.kind}: {name}"].append(seed)
        else:
            for what, value in outcome.apart.items():
                most[what] = max(most.get(what, 0.0), value)
            widened += [(seed, outcome.widened)] if outcome.widened else []
    print(f"\n{asked.count} modules, {time.monotonic() - began:.0f} s: {dict(kinds)}")
    for name, seeds in sorted(words.items(), key=lambda item: (item[0][:3], -len(item[1]))):
        print(f"{len(seeds):5} {name}   seeds {', '.join(map(str, seeds[:8]))}")
    print("largest difference of exact ones:")
    for what, value in sorted(most.items()):
        print(f"{value:8.1e} {what}")
    if widened:
        print(f"beyond the bounds, but within the module's own rounding: {widened}")


if __name__ == "__main__":
    main()
