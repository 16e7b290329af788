"""What becomes of many generated modules: a table of outcomes, and each failure with its seed.

python tests/adoption/survey.py --from 0 --count 200 [--reduce] [--show]
"""

import argparse
import re
import time
from collections import Counter, defaultdict
from typing import Any

import torch
from grammar import generate
from referee import Outcome, judge

__all__ = ["mode_of", "reduced"]


def mode_of(seed: int) -> Any:
    """What is made of batch norm's statistics in the module of a seed."""
    return "step" if seed // 2 % 2 else "frozen"


def kind_of(words: str) -> str:
    """A refusal without what is the module's own."""
    reason = words.split(" (")[0]
    place = re.search(r"[(][^()]*?: (\w+)", words)
    return f"{reason[:70]}{f' [{place[1]}]' if place else ''}"


def reduced(seed: int, outcome: Outcome) -> tuple[list[Any], Outcome]:
    """Leave out as many steps as the failure survives."""
    without: list[Any] = []
    trials: list[Any] = ["wrapper", *reversed(generate(seed).optional)]
    for number in trials:
        other = judge(generate(seed, [*without, number]), mode_of(seed))
        if other.kind == "failed" and other.words == outcome.words:
            without, outcome = [*without, number], other
    return without, outcome


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--from", type=int, default=0, dest="start")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument(
        "--reduce", action="store_true", help="leave out what is not needed to fail"
    )
    parser.add_argument("--show", action="store_true", help="print each module")
    asked = parser.parse_args()
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
            without: list[Any] = []
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
