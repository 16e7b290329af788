"""What bench/memory/leaks.py takes for a leak."""

import random
from typing import Any

import pytest

from bench.memory import leaks

STEPS = range(0, 2001, 100)
PAGE = 4096


def broken(grown: dict[str, list[int]]) -> list[str]:
    """Claims that do not hold of ranks whose second one holds that much more at each count."""
    noise = random.Random(7)
    ranks: list[dict[str, list[int]]] = [
        {"step": [*STEPS]}
        | {of: [noise.randrange(100, 200)] * len(STEPS) for of in leaks.COUNTS}
        | {"rss_bytes": [(90_000 + noise.randrange(2)) * PAGE for _ in STEPS]}
        for _ in range(2)
    ]
    for of, more in grown.items():
        ranks[1][of] = [held + one for held, one in zip(ranks[1][of], more, strict=True)]
    figures: dict[str, Any] = {mode: {"ranks": ranks} for mode in leaks.MODES}
    claims = leaks.judged(figures, quick=False)
    return [one.claim.partition(": ")[2] for one in claims if not one.holds]


def test_a_piece_of_the_heap_is_in_the_slopes_alone() -> None:
    grown = [(step > 1200) * 100 * PAGE for step in STEPS]
    assert set(broken({"rss_bytes": grown})) == {leaks.SLOPE}


@pytest.mark.parametrize("every", [1, 100, 300, 700])
def test_bytes_that_come_again_are_one(every: int) -> None:
    """As the heap shows them: in pieces, the more seldom the larger."""
    grown = [step // every * every * 600 // PAGE * PAGE for step in STEPS]
    assert leaks.BESIDE in broken({"rss_bytes": grown})


def test_much_at_once_is_one() -> None:
    grown = [(step > 1200) * 300 * PAGE for step in STEPS]
    assert set(broken({"rss_bytes": grown})) == {leaks.SLOPE, "MiB added in all"}


@pytest.mark.parametrize("of", leaks.COUNTS)
def test_one_more_each_few_validations_is_one(of: str) -> None:
    assert set(broken({of: [step // 500 for step in STEPS]})) == {f"{of} added"}
