"""Which broken and hostile files give anything but a result or one sentence? Fuzzing counted.

    python -m bench.survival.fuzz [--quick] [--examples N] [--seed S]

Runs `tests/fuzz` (as `make fuzz` does) with N inputs for each kind at the most (60; quick: 5), and
counts the inputs that were made, by kind, and the kinds of which one was not refused in a sentence,
gave a wrong result or took too long. The same seed makes the same inputs.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from typing import Any

from bench.report import ROOT, at_most, report

KIND = re.compile(r"^tests/fuzz/(\w+)\.py::test_(.+):$", re.MULTILINE)
COUNTS = re.compile(r"- (\d+) passing, (\d+) failing, and (\d+) invalid")
SECONDS = re.compile(r"- during \w+ phase \(([\d.]+) seconds\)")


def main() -> None:
    """Run all kinds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--examples", type=int)
    parser.add_argument("--seed", type=int, default=20261122)
    asked = parser.parse_args()
    examples = asked.examples or (5 if asked.quick else 60)
    command = [sys.executable, "-m", "pytest", "-q", "tests/fuzz", "--hypothesis-profile=fuzz"]
    command += [f"--hypothesis-seed={asked.seed}", "--hypothesis-show-statistics"]
    began = time.monotonic()
    ended = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "FUZZ_EXAMPLES": str(examples), "PYTHONPATH": str(ROOT)},
    )
    seconds = time.monotonic() - began
    kinds = counted(ended.stdout)
    if ended.returncode not in (0, 1) or not kinds:
        raise RuntimeError(f"tests/fuzz did not run:\n{ended.stdout[-4000:]}")
    inputs = sum(kind["inputs"] for kind in kinds.values())
    failed = sorted(name for name, kind in kinds.items() if kind["failing"])
    figures = {"seed": asked.seed, "examples": examples, "seconds": seconds, "inputs": inputs}
    claim = f"kinds of {len(kinds)} with findings, of {inputs} inputs"
    figures |= {"findings": failed, "kinds": kinds}
    report("fuzz", figures, [at_most(claim, len(failed), 0)])


def counted(text: str) -> dict[str, dict[str, Any]]:
    """Inputs and seconds of each kind, from Hypothesis's statistics."""
    starts = list(KIND.finditer(text))
    found = {}
    for start, after in zip(starts, [*starts[1:], None], strict=True):
        part = text[start.end() : after.start() if after else None]
        numbers = [tuple(map(int, counts)) for counts in COUNTS.findall(part)]
        found[start[2]] = {
            "inputs": sum(passing + failing for passing, failing, _ in numbers),
            "failing": sum(failing for _, failing, _ in numbers),
            "seconds": sum(map(float, SECONDS.findall(part))),
        }
    return found


if __name__ == "__main__":
    main()
