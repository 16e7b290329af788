"""Shares and rates against counting: times are whole numbers, so each second is a cell."""

import random
from itertools import pairwise

import pytest

from tilenet.files.chrome_trace import TraceEvent
from tilenet.parallel.device_use import (
    busy_shares,
    copies_by_direction,
    length,
    overlap,
    union,
)

END = 90
Interval = tuple[float, float]


def intervals(rng: random.Random, most: int, longest: int = 12) -> list[Interval]:
    found = []
    for _ in range(rng.randrange(most)):
        start = rng.randrange(END - longest)
        found.append((float(start), float(start + rng.randrange(longest + 1))))
    return found


def cells(some: list[Interval]) -> set[int]:
    return {second for start, stop in some for second in range(int(start), int(stop))}


def steps_of(rng: random.Random) -> list[Interval]:
    """Disjoint, in order, with gaps and without."""
    at = sorted(rng.sample(range(END), 6))
    steps = [(float(a), float(b)) for a, b in pairwise(at)]
    return [step for step in steps if rng.random() < 0.7] or steps


@pytest.mark.parametrize("seed", range(60))
def test_unions_and_overlaps_cover_what_cells_say(seed: int) -> None:
    rng = random.Random(seed)
    ours, theirs = intervals(rng, 14), intervals(rng, 14)
    found = union(ours)
    assert cells(found) == cells(ours)
    assert length(found) == len(cells(ours))
    assert all(a[1] < b[0] for a, b in pairwise(found))
    both = overlap(found, union(theirs))
    assert cells(both) == cells(ours) & cells(theirs)
    assert length(both) == len(cells(ours) & cells(theirs))


def events_of(rng: random.Random) -> list[TraceEvent]:
    names = {
        "kernel": ["conv", "aten::not_an_operator"],
        "gpu_memcpy": ["Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pageable)",
                       "Memcpy DtoD (Device -> Device)", "CopyDeviceToHost", "CopyHostToDevice"],
        "cpu_op": ["aten::conv2d", "aten::copy_", "Exchange", "autograd::engine"],
        "user_annotation": ["aten::mark"],
    }  # fmt: skip
    found = []
    for start, stop in intervals(rng, 60):
        kind = rng.choice(list(names))
        on_gpu = kind in ("kernel", "gpu_memcpy")
        found.append(
            TraceEvent(
                kind,
                rng.choice(names[kind]),
                start,
                stop,
                rng.randrange(4) if on_gpu else None,
                rng.choice([None, rng.randrange(1, 10**9)]) if kind == "gpu_memcpy" else None,
            )
        )
    return found


@pytest.mark.parametrize("seed", range(60))
def test_a_gpu_is_busy_while_a_kernel_runs_and_a_cpu_while_an_operator_does(seed: int) -> None:
    rng = random.Random(seed)
    events, steps = events_of(rng), steps_of(rng)
    inside = cells(steps)

    def share(some: list[TraceEvent]) -> float:
        return len(cells([(one.start, one.stop) for one in some]) & inside) / len(inside)

    kernels = [one for one in events if one.kind == "kernel"]
    wanted = {f"cuda:{gpu}": share([k for k in kernels if k.device == gpu]) for gpu in (0, 2)}
    seen = any(kernel.device in (0, 2) for kernel in kernels)
    assert busy_shares(events, steps, [0, 2]) == (wanted if seen else {})
    ops = [one for one in events if one.kind == "cpu_op" and one.name[:6] == "aten::"]
    assert busy_shares(events, steps, []) == {"cpu": share(ops)}


@pytest.mark.parametrize("seed", range(60))
def test_copies_count_by_direction_where_they_begin_in_a_step(seed: int) -> None:
    rng = random.Random(seed)
    events, steps = events_of(rng), steps_of(rng)
    found = copies_by_direction(events, steps)
    assert list(found) == ["to_host", "to_device"]
    for direction, words in (("to_host", ("DtoH", "ToHost")), ("to_device", ("HtoD", "ToDevice"))):
        some = [
            one
            for one in events
            if one.kind == "gpu_memcpy"
            and one.num_bytes
            and int(one.start) in cells(steps)
            and any(word in one.name for word in words)
        ]
        copied, seconds = found[direction].num_bytes, found[direction].seconds
        assert copied == sum(one.num_bytes or 0 for one in some)
        assert seconds == len(cells([(one.start, one.stop) for one in some]))
        assert found[direction].gb_per_s == (copied / seconds / 1e9 if seconds else None)
