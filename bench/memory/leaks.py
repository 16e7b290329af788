"""Does a run hold more and more, the longer it trains?

2 000 steps (quick: 200) of a small U-Net with instance norm over whole images on two ranks, in both
halo modes, with a validation and a checkpoint every twentieth of them and a report at the end. Both
ranks count their resident memory, open files, threads, Python's tensors and other objects,
communicators and requests. Judged are the last three quarters of the steps, memory in three ways:
the median of the slopes between any two counts (Theil-Sen), into which a heap that grows by one
piece in their middle comes too; what is added beside the largest growth between two counts, which
leaves that out, while a leak comes again; and all that is added.
"""

import tempfile
from datetime import date
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench.report import Claim, Found, at_most, on_ranks
from bench.scenes import write_pair

RANKS = 2
BYTES_PER_STEP = 256  # flat: 25 MB in 100 000 steps
ADDED_MIB = 1  # in all; quick: 4
SLOPE = "bytes per step, median of slopes"
BESIDE = "bytes per step beside the largest growth"
MODES = "overlap", "exchange"
COUNTS = "files", "threads", "tensors", "objects", "communicators", "request_slot"


def late(counts: dict[str, list[int]], name: str) -> list[int]:
    """Counts from the first quarter of the steps on; that after the run aside."""
    pairs = list(zip(counts["step"], counts[name], strict=True))[:-1]
    return [count for step, count in pairs if step >= counts["step"][-1] / 4]


def added(counts: dict[str, list[int]]) -> dict[str, float]:
    """By the last three quarters of a rank's steps."""
    held = late(counts, "rss_bytes")
    steps = late(counts, "step")
    largest = max(0, *(after - before for before, after in pairwise(held)))
    more: dict[str, float] = {of: late(counts, of)[-1] - late(counts, of)[0] for of in COUNTS}
    counted = combinations(zip(steps, held, strict=True), 2)
    slope = median((after - before) / (last - first) for (first, before), (last, after) in counted)
    beside = (held[-1] - held[0] - largest) / (steps[-1] - steps[0])
    return more | {"bytes": held[-1] - held[0], SLOPE: round(slope, 3), BESIDE: round(beside, 3)}


def judged(figures: dict[str, Any], *, quick: bool) -> list[Claim]:
    """Claims on the counts of all modes, beside which is put what they added."""
    claims = []
    for mode in MODES:
        ranks = [added(counts) for counts in figures[mode]["ranks"]]
        figures[mode]["added"] = ranks
        most = {of: max(rank[of] for rank in ranks) for of in ranks[0]}
        # In few steps heaps have not found their size.
        per_step, in_all = (BYTES_PER_STEP * 40, 4) if quick else (BYTES_PER_STEP, ADDED_MIB)
        claims += [
            *(at_most(f"{mode}: {of}", most[of], per_step) for of in (SLOPE, BESIDE)),
            at_most(f"{mode}: MiB added in all", most["bytes"] / 2**20, in_all),
            *(at_most(f"{mode}: {of} added", most[of], 1) for of in COUNTS),
        ]
    return claims


def bench(quick: bool) -> Found:
    """Train in both modes."""
    steps = 200 if quick else 2000
    figures: dict[str, Any] = {"date": date.today().isoformat(), "ranks": RANKS, "steps": steps}
    with tempfile.TemporaryDirectory() as name:
        write_pair(Path(name), (3, 128, 160), 3)
        for mode in MODES:
            # By name: what imports it starts MPI.
            found = on_ranks(RANKS, "bench.memory.leaks_run:trained", name, mode, steps)
            figures[mode] = {"ranks": found}
    return figures, judged(figures, quick=quick)
