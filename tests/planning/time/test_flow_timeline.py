"""The simulated step of one forward, one backward: nothing starts before it can."""

from itertools import pairwise, product

import numpy as np
import pytest

from tilenet.planning.time.timeline import Event, Timeline, simulate, simulate_flow


def by_work(timeline: Timeline) -> dict[tuple[str, int, int], Event]:
    return {(one.kind, one.partition, one.micro_batch): one for one in timeline.events}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("count", "batches", "most"), list(product((2, 3, 5), (1, 4, 9), (1, 3, 8)))
)
def test_each_work_waits_for_what_it_needs(
    count: int, batches: int, most: int, recompute: bool
) -> None:
    rng = np.random.default_rng(count * 100 + batches * 10 + most)
    forward, backward = rng.uniform(1, 5, (2, count))
    moves = rng.uniform(0, 2, count - 1)
    timeline = simulate_flow(forward, backward, moves, batches, most, recompute=recompute)
    works = by_work(timeline)
    kinds = {"F": count, "B": count, "R": (count - 1) * recompute}
    assert len(works) == len(timeline.events) == batches * sum(kinds.values())
    for (kind, j, i), one in works.items():
        takes = (backward if kind == "B" else forward)[j]
        assert one.stop_s - one.start_s == pytest.approx(takes, rel=1e-12)
        before = {"F": ("F", j - 1, i), "B": ("B", j + 1, i), "R": ("F", j, i)}[kind]
        if before in works:
            move = 0 if kind == "R" else moves[min(j, before[1])]
            assert one.start_s >= works[before].stop_s + move - 1e-9
    for j in range(count):
        own = sorted(
            (one for one in timeline.events if one.partition == j), key=lambda one: one.start_s
        )
        assert all(one.stop_s <= next_.start_s + 1e-9 for one, next_ in pairwise(own))
        under_way = np.cumsum([{"F": 1, "R": 0, "B": -1}[one.kind] for one in own])
        assert under_way.max() == min(most, count - j, batches)
        ended = [one.micro_batch for one in own if one.kind == "B"]
        assert ended == sorted(ended)


@pytest.mark.parametrize(("count", "batches"), [(2, 1), (2, 7), (4, 4), (4, 32), (6, 11)])
def test_it_drains_once_a_step(count: int, batches: int) -> None:
    """All alike, a partition is idle for as long as the others take to fill and to drain."""
    timeline = simulate_flow(
        [2.0] * count, [3.0] * count, [0.0] * (count - 1), batches, count, recompute=False
    )
    assert timeline.makespan_s == pytest.approx(5 * (batches + count - 1), rel=1e-12)
    assert timeline.bubble == pytest.approx((count - 1) / (batches + count - 1), rel=1e-12)


def test_fewer_at_once_only_takes_longer() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        forward, backward = rng.uniform(1, 2, (2, 4))
        took = [
            simulate_flow(forward, backward, [0.0] * 3, 9, most, recompute=False).makespan_s
            for most in (1, 2, 3, 4, 9)
        ]
        assert took == sorted(took, reverse=True)
        assert took[0] == pytest.approx(9 * (forward.sum() + backward.sum()), rel=1e-12)
        assert took[-1] == took[-2]
        # GPipe with all of the step at once waits as little, but holds all of it.
        assert took[-1] >= max(forward + backward) * 9
        whole = simulate(forward, backward, [0.0] * 3, 3, "never").makespan_s
        assert took[-1] <= 3 * whole + 1e-9
