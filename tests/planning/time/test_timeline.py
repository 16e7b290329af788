"""Timelines: GPipe's figure, and what must hold of every one of them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilenet.choices import Checkpointing
from tilenet.planning.time.timeline import Event, Timeline, simulate

# Y. Huang et al., "GPipe", 2019, figure 2(c), its devices from the top to the bottom
GPIPE = """\
             t0  t1  t2  t3  t4  t5  t6  t7  t8  t9  t10  t11  t12  t13
partition 0  F0  F1  F2  F3  ·   ·   ·   ·   ·   ·   B3   B2   B1   B0
partition 1  ·   F0  F1  F2  F3  ·   ·   ·   ·   B3  B2   B1   B0   ·
partition 2  ·   ·   F0  F1  F2  F3  ·   ·   B3  B2  B1   B0   ·    ·
partition 3  ·   ·   ·   F0  F1  F2  F3  B3  B2  B1  B0   ·    ·    ·"""

# followed by hand: partition 0 recomputes 1 and 0 while it waits for their gradients
RECOMPUTED = """\
             t0  t1  t2  t3  t4  t5  t6  t7  t8  t9  t10  t11  t12  t13
partition 0  F0  F1  F2  ·   ·   ·   B2  B2  R1  B1  B1   R0   B0   B0
partition 1  ·   F0  F1  F2  B2  B2  R1  B1  B1  R0  B0   B0   ·    ·"""
WAITING = """\
             t0  t1  t2  t3  t4  t5  t6  t7  t8  t9  t10  t11  t12  t13  t14  t15  t16
partition 0  F0  F1  F2  R2  ·   ·   ·   ·   ·   ·   ·    ·    B2   R1   B1   R0   B0
partition 1  ·   ·   F0  F1  F2  R2  ·   ·   ·   ·   B2   R1   B1   R0   B0   ·    ·
partition 2  ·   ·   ·   ·   F0  F1  F2  R2  B2  R1  B1   R0   B0   ·    ·    ·    ·"""

MODES: list[Checkpointing] = ["always", "except_last", "never"]


def table(timeline: Timeline) -> str:
    """Its events by partition and second, in the form of the figures above."""
    slots = range(round(timeline.makespan_s))
    rows = [["", *(f"t{slot}" for slot in slots)]]
    for number in range(timeline.num_partitions):
        mine = [event for event in timeline.events if event.partition == number]
        shown = {
            slot: f"{event.kind}{event.micro_batch}"
            for event in mine
            for slot in slots
            if event.start_s < slot + 0.5 < event.stop_s
        }
        rows.append([f"partition {number}", *(shown.get(slot, "·") for slot in slots)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def test_four_partitions_and_four_micro_batches_are_gpipes_figure() -> None:
    timeline = simulate([1] * 4, [1] * 4, [0] * 3, 4, "never")
    assert table(timeline) == GPIPE
    assert timeline.makespan_s == 14
    assert timeline.busy_s == (8, 8, 8, 8)
    assert timeline.bubble == 1 - 32 / 56


def test_recomputation_starts_before_the_gradient_arrives() -> None:
    timeline = simulate([1] * 2, [2] * 2, [0], 3, "except_last")
    assert table(timeline) == RECOMPUTED
    assert timeline.makespan_s == 14
    assert table(simulate([1] * 3, [1] * 3, [1] * 2, 3, "always")) == WAITING


SECONDS = st.floats(0.01, 10)
Step = tuple[list[float], list[float], list[float], int]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Seconds of partitions and boundaries, and micro-batches."""
    n = draw(st.integers(1, 6))
    several = st.lists(SECONDS, min_size=n, max_size=n)
    forward, backward = draw(several), draw(several)
    transfer = draw(st.lists(st.floats(0, 15), min_size=n - 1, max_size=n - 1))
    return forward, backward, transfer, draw(st.integers(1, 7))


def by_name(timeline: Timeline) -> dict[tuple[str, int, int], Event]:
    found = {(e.kind, e.micro_batch, e.partition): e for e in timeline.events}
    assert len(found) == len(timeline.events)
    return found


@given(steps(), st.sampled_from(MODES))
def test_nothing_starts_before_what_it_needs(step: Step, mode: Checkpointing) -> None:
    forward, backward, transfer, m = step
    n = len(forward)
    timeline = simulate(*step, mode)
    events = by_name(timeline)
    recomputed = {"always": m, "except_last": m - 1, "never": 0}[mode]
    assert len(events) == n * (2 * m + recomputed)
    loss_s = events["F", m - 1, n - 1].stop_s  # when it is taken
    for j in range(n):
        for i in range(m):
            first, last = events["F", i, j], events["B", i, j]
            assert first.stop_s - first.start_s == pytest.approx(forward[j])
            assert last.stop_s - last.start_s == pytest.approx(backward[j])
            assert last.start_s >= loss_s
            if i:
                assert first.start_s >= events["F", i - 1, j].stop_s
                assert events["B", i - 1, j].start_s >= last.stop_s
            if j:
                assert first.start_s >= events["F", i, j - 1].stop_s + transfer[j - 1]
            if j < n - 1:
                assert last.start_s >= events["B", i, j + 1].stop_s + transfer[j]
            assert (("R", i, j) in events) == (i < recomputed)
            if i < recomputed:
                again = events["R", i, j]
                assert again.stop_s - again.start_s == pytest.approx(forward[j])
                assert last.start_s >= again.stop_s
                # as early as the device allows, however late the gradient is
                before = events["B", i + 1, j] if i + 1 < m else events["F", i, j]
                assert again.start_s == before.stop_s


@given(steps(), st.sampled_from(MODES))
def test_a_device_does_one_thing_at_a_time_and_no_step_is_too_short(
    step: Step, mode: Checkpointing
) -> None:
    forward, backward, transfer, m = step
    timeline = simulate(*step, mode)
    for j in range(len(forward)):
        mine = [event for event in timeline.events if event.partition == j]
        assert all(a.stop_s <= b.start_s for a, b in pairwise(mine))
    near = pytest.approx
    path_s = sum(forward) + sum(backward) + 2 * sum(transfer)
    assert timeline.makespan_s >= path_s or timeline.makespan_s == near(path_s)
    busy_s = max(timeline.busy_s)
    assert timeline.makespan_s >= busy_s or timeline.makespan_s == near(busy_s)
    for moved_s in transfer:  # a link carries one map after another
        assert timeline.makespan_s >= m * moved_s
    assert -1e-9 < timeline.bubble < 1
    # never later than doing everything in turn
    again = {"always": m, "except_last": m - 1, "never": 0}[mode] * sum(forward)
    in_turn_s = m * (sum(forward) + sum(backward) + 2 * sum(transfer)) + again
    assert timeline.makespan_s <= in_turn_s or timeline.makespan_s == near(in_turn_s)


@given(st.integers(1, 9), st.integers(1, 12), SECONDS, SECONDS)
def test_equal_partitions_follow_the_closed_form(n: int, m: int, f: float, b: float) -> None:
    timeline = simulate([f] * n, [b] * n, [0] * (n - 1), m, "never")
    assert timeline.makespan_s == pytest.approx((m + n - 1) * (f + b))
    assert timeline.bubble == pytest.approx((n - 1) / (m + n - 1))


@given(steps())
def test_more_recomputation_is_never_faster(step: Step) -> None:
    spans = [simulate(*step, mode).makespan_s for mode in MODES]
    assert spans[0] >= spans[1] >= spans[2]
