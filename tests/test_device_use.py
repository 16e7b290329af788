"""What traces say, against counting: times are whole numbers, so each second is a cell.

Without a GPU, its events are made up as its tracer writes them.
"""

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tilenet.parallel.health.trace import (
    TraceEvent,
    TraceRecorder,
    _sentence,
    busy_shares,
    copies_by_direction,
    length,
    overlap,
    union,
)
from tilenet.parallel.swap.statistics import SwapCounts

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


def mark(number: int, start: int, stop: int) -> TraceEvent:
    return TraceEvent("user_annotation", f"tilenet: step {number}", start, stop)


def gpu_trace() -> list[TraceEvent]:
    return [
        mark(41, 30, 40),
        mark(40, 10, 20),
        TraceEvent("user_annotation", "Optimizer.step#SGD.step", 0, 90),
        TraceEvent("kernel", "conv", 11, 15, 1),
        TraceEvent("kernel", "add", 14, 16, 1),
        TraceEvent("kernel", "conv", 38, 44, 1),
        TraceEvent("kernel", "conv", 31, 32, 3),
        TraceEvent("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 12, 14, 1, 78_000_000_000),
        TraceEvent("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 33, 37, 3, 26_000_000_000),
        TraceEvent("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 21, 29, 1, 10**12),
    ]


def test_a_trace_of_two_gpus_has_a_share_for_each_and_rates_for_both_directions() -> None:
    devices = [torch.device("cuda", 3), torch.device("cuda", 1), torch.device("cuda", 3)]
    recorder = TraceRecorder(Path(), range(40, 42), devices, write=True)
    recorder._recording = True
    recorder.add(9.5, 1.5, 0.5, SwapCounts(out_bytes=7, wait_seconds=0.25))
    recorder.add(10.5, 2.5, 0.25, SwapCounts(in_bytes=5, wait_seconds=0.5))
    found = recorder._figures(gpu_trace())
    assert (found["first_step"], found["last_step"]) == (40, 41)
    assert found["busy_share"] == {"cuda:1": (5 + 2) / 20, "cuda:3": 1 / 20}
    assert {name: one["gb_per_s"] for name, one in found["copies"].items()} == {
        "to_host": 39.0,
        "to_device": 6.5,
    }
    assert found["seconds"] == 20
    parts = {"compute": 14.5, "read": 4.0, "reduce": 0.75, "wait_for_copies": 0.75}
    assert found["parts"] == parts
    assert _sentence(found) == (
        "trace-rank0.json.gz: steps 40 to 41; busy cuda:1 35.0%, cuda:3 5.0%; GB/s to host 39.0, "
        "to device 6.5; 20 s, of which compute 72.5%, read 20.0%, reduce 3.8%, "
        "wait for copies 3.8%"
    )
    no_kernel = [event for event in gpu_trace() if event.kind != "kernel"]
    assert "busy unknown, no kernel was recorded" in _sentence(recorder._figures(no_kernel))


@pytest.mark.parametrize("write", [True, False])
def test_all_ranks_know_which_steps_take_longer(write: bool) -> None:
    recorder = TraceRecorder(Path(), range(40, 61), [torch.device("cpu")], write=write)
    assert [number for number in range(1, 99) if recorder.slows(number)] == [40, 61]
    recorder = TraceRecorder(Path(), range(0), [torch.device("cpu")], write=write)
    assert not any(recorder.slows(number) for number in range(99))
