"""What the bench leaks takes for a leak."""

import random
from typing import Any

import pytest

from bench.memory import leaks

STEPS = range(0, 2001, 100)
PAGE = 4096


@pytest.mark.parametrize(
    ("of", "grown", "wanted"),
    [
        # A piece of the heap is in the slopes alone.
        ("rss_bytes", lambda step: (step > 1200) * 100 * PAGE, {leaks.SLOPE}),
        # Bytes that come again, as the heap shows them: in pieces, the more seldom the larger.
        ("rss_bytes", lambda step: step // 300 * 300 * 600 // PAGE * PAGE, {leaks.BESIDE}),
        ("rss_bytes", lambda step: (step > 1200) * 300 * PAGE, {"MiB added in all"}),
        *((of, lambda step: step // 500, {f"{of} added"}) for of in leaks.COUNTS),
    ],
)
def test_what_grows_shows(of: str, grown: Any, wanted: set[str]) -> None:
    noise = random.Random(7)
    ranks: list[dict[str, list[int]]] = [
        {"step": [*STEPS]}
        | {name: [noise.randrange(100, 200)] * len(STEPS) for name in leaks.COUNTS}
        | {"rss_bytes": [(90_000 + noise.randrange(2)) * PAGE for _ in STEPS]}
        for _ in range(2)
    ]
    ranks[1][of] = [held + grown(step) for held, step in zip(ranks[1][of], STEPS, strict=True)]
    figures: dict[str, Any] = {mode: {"ranks": ranks} for mode in leaks.MODES}
    claims = leaks.judged(figures, quick=False)
    broken = {one.claim.partition(": ")[2] for one in claims if not one.holds}
    assert wanted <= broken <= wanted | {leaks.SLOPE, leaks.BESIDE, "MiB added in all"}
