"""Timelines: GPipe's figure, and what must hold of every one of them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilenet.errors import TilenetError
from tilenet.model.choices import Checkpointing
from tilenet.planning.time.timeline import Event, Timeline, simulate

# Y. Huang et al., "GPipe", 2019, figure 2(c), its devices from the top to the bottom, the loss in a
# slot of its own
GPIPE = """\
             t0  t1  t2  t3  t4  t5  t6  t7    t8  t9  t10  t11  t12  t13  t14  t15
partition 0  F0  F1  F2  F3  ·   ·   ·   ·     ·   ·   ·    B3   B2   B1   B0   update
partition 1  ·   F0  F1  F2  F3  ·   ·   ·     ·   ·   B3   B2   B1   B0   ·    update
partition 2  ·   ·   F0  F1  F2  F3  ·   ·     ·   B3  B2   B1   B0   ·    ·    update
partition 3  ·   ·   ·   F0  F1  F2  F3  loss  B3  B2  B1   B0   ·    ·    ·    update"""

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
            slot: f"{event.kind}{'' if event.micro_batch is None else event.micro_batch}"
            for event in mine
            for slot in slots
            if event.start_s < slot + 0.5 < event.stop_s
        }
        rows.append([f"partition {number}", *(shown.get(slot, "·") for slot in slots)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def test_four_partitions_and_four_micro_batches_are_gpipes_figure() -> None:
    timeline = simulate([1] * 4, [1] * 4, [0] * 3, 4, "never", loss_s=1, update_s=1)
    assert table(timeline) == GPIPE
    assert timeline.makespan_s == 16
    assert timeline.busy_s == (9, 9, 9, 10)
    assert timeline.bubble == 1 - 37 / 64


def test_recomputation_starts_before_the_gradient_arrives() -> None:
    timeline = simulate([1] * 2, [2] * 2, [0], 3, "except_last")
    assert table(timeline) == RECOMPUTED
    assert timeline.makespan_s == 14
    assert table(simulate([1] * 3, [1] * 3, [1] * 2, 3, "always")) == WAITING


SECONDS = st.floats(0.01, 10)
Step = tuple[list[float], list[float], list[float], int, float, float]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Seconds of partitions and boundaries, micro-batches, loss and update."""
    n = draw(st.integers(1, 6))
    several = st.lists(SECONDS, min_size=n, max_size=n)
    forward, backward = draw(several), draw(several)
    transfer = draw(st.lists(st.floats(0, 15), min_size=n - 1, max_size=n - 1))
    return forward, backward, transfer, draw(st.integers(1, 7)), draw(SECONDS), draw(SECONDS)


def by_name(timeline: Timeline) -> dict[tuple[str, int | None, int], Event]:
    found = {(e.kind, e.micro_batch, e.partition): e for e in timeline.events}
    assert len(found) == len(timeline.events)
    return found


@given(steps(), st.sampled_from(MODES))
def test_nothing_starts_before_what_it_needs(step: Step, mode: Checkpointing) -> None:
    forward, backward, transfer, m, loss_s, update_s = step
    n = len(forward)
    timeline = simulate(*step[:4], mode, loss_s, update_s)
    events = by_name(timeline)
    recomputed = {"always": m, "except_last": m - 1, "never": 0}[mode]
    assert len(events) == n * (2 * m + recomputed + 1) + 1
    loss = events["loss", None, n - 1]
    for j in range(n):
        for i in range(m):
            first, last = events["F", i, j], events["B", i, j]
            assert first.stop_s - first.start_s == pytest.approx(forward[j])
            assert last.stop_s - last.start_s == pytest.approx(backward[j])
            assert loss.start_s >= events["F", i, n - 1].stop_s
            assert last.start_s >= loss.stop_s
            assert events["update", None, j].start_s >= max(
                events["B", k, p].stop_s for k in range(m) for p in range(n)
            )
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
                if j == n - 1 and i + 1 == m:
                    before = loss
                assert again.start_s == before.stop_s


@given(steps(), st.sampled_from(MODES))
def test_a_device_does_one_thing_at_a_time_and_no_step_is_too_short(
    step: Step, mode: Checkpointing
) -> None:
    forward, backward, transfer, m, loss_s, update_s = step
    timeline = simulate(*step[:4], mode, loss_s, update_s)
    for j in range(len(forward)):
        mine = [event for event in timeline.events if event.partition == j]
        assert all(a.stop_s <= b.start_s for a, b in pairwise(mine))
    near = pytest.approx
    path_s = sum(forward) + sum(backward) + 2 * sum(transfer) + loss_s + update_s
    assert timeline.makespan_s >= path_s or timeline.makespan_s == near(path_s)
    busy_s = max(timeline.busy_s)
    assert timeline.makespan_s >= busy_s or timeline.makespan_s == near(busy_s)
    for moved_s in transfer:  # a link carries one map after another
        assert timeline.makespan_s >= m * moved_s
    assert -1e-9 < timeline.bubble < 1
    # never later than doing everything in turn
    again = {"always": m, "except_last": m - 1, "never": 0}[mode] * sum(forward)
    in_turn_s = m * (sum(forward) + sum(backward) + 2 * sum(transfer)) + again + loss_s + update_s
    assert timeline.makespan_s <= in_turn_s or timeline.makespan_s == near(in_turn_s)


@given(st.integers(1, 9), st.integers(1, 12), SECONDS, SECONDS)
def test_equal_partitions_follow_the_closed_form(n: int, m: int, f: float, b: float) -> None:
    timeline = simulate([f] * n, [b] * n, [0] * (n - 1), m, "never")
    assert timeline.makespan_s == pytest.approx((m + n - 1) * (f + b))
    assert timeline.bubble == pytest.approx((n - 1) / (m + n - 1))


@given(steps())
def test_more_recomputation_is_never_faster(step: Step) -> None:
    spans = [simulate(*step[:4], mode, *step[4:]).makespan_s for mode in MODES]
    assert spans[0] >= spans[1] >= spans[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([], [], [], 1, "never"), r"\(forward: 0, backward: 0, transfers: 0\)"),
        (([1], [1, 2], [], 1, "never"), r"\(forward: 1, backward: 2, transfers: 0\)"),
        (([1, 2], [1, 2], [], 1, "never"), r"transfers: 0\)"),
        (([1, 2], [1, 2], [0], 0, "never"), r"micro_batches: 0\); nearest: 1"),
        (([1, 2], [1, 2], [0], 3, "sometimes"), r"\(checkpointing: sometimes\)"),
    ],
)
def test_what_makes_no_timeline_is_refused(arguments: tuple[object, ...], said: str) -> None:
    with pytest.raises(TilenetError, match=said):
        simulate(*arguments)  # type: ignore[arg-type]
