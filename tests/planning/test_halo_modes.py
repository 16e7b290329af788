"""What a plan says of exchange and sweep: the fastest plan of the one, a step of the other."""

from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from questions import small_machine, small_question

from tilenet.errors import TilenetError
from tilenet.geometry.sweep import strip_edges, sweep
from tilenet.geometry.unet import UNetOptions
from tilenet.parallel.exchange.swept_partitions import idle_share
from tilenet.planning.estimate import Estimator
from tilenet.planning.explain import answer, explain
from tilenet.planning.halo_modes import SweptStep, exchanged, swept
from tilenet.planning.memory.swept_partitions import partition_peaks
from tilenet.planning.memory.trained_sweeps import plan_sweeps, trained_bytes
from tilenet.planning.plan import Plan, Question
from tilenet.planning.search import Search

OPTIONS = UNetOptions(poolings=1, convolutions=1, base=4, bands=3, classes=2)


def plan_of(image: tuple[int, int] = (90, 71), **changes: Any) -> Plan:
    asked = Question(OPTIONS, 3, image, small_machine(3, 2**26), partitions=1, grid=(3, 3))
    return answer(Search(replace(asked, **changes)))[0]


@pytest.mark.parametrize("seed", range(0, 40, 2))
def test_the_fastest_plan_that_exchanges(seed: int) -> None:
    asked = replace(small_question(seed), halo="exact")
    plans = Search(asked).best(1)
    if not plans:
        pytest.skip("nothing fits")
    found = exchanged(plans[0])
    others = []
    with suppress(TilenetError):  # tiles are too small
        others = Search(replace(asked, halo_mode="exchange")).best(1)
    if plans[0].layout.grid == (1, 1) or asked.options.padding == "valid" or not others:  # type: ignore[union-attr]
        assert found is None
    else:
        assert found is not None
        assert found.step_s == others[0].step_s


@pytest.mark.parametrize(("batch_size", "width", "images"), [(1, 24, 1), (3, 72, 1), (4, 24, 4)])
def test_a_step_by_sweeps(batch_size: int, width: int, images: int) -> None:
    """On three ranks 71 columns are 72: three ranks share an image, or have one each."""
    plan = plan_of(batch_size=batch_size)
    step = swept(plan)
    assert step is not None
    rows = plan_sweeps(plan.question.layers, 90, width, 4).edges[1]
    assert (step.columns_px, step.strip_rows) == (width, rows)
    weights = 4 * sum(layer.num_parameters for layer in plan.question.layers)
    tensors = trained_bytes(plan.question.layers, 90, width, rows, 4)
    assert step.device_bytes == tensors + 4 * weights + 90 * width * 3 * 4
    one = Estimator(replace(plan.question, halo_mode="exchange", grid=None))
    seconds = images * sum(
        2 * time.forward_s + time.backward_s for time in one.times((1, 90, width))
    )
    assert step.step_s == pytest.approx(seconds + one.least_rest_s(1), rel=1e-12)


def test_strips_over_partitions_where_a_rank_per_device_does_not_fit() -> None:
    """Of two images each device would have one; of partitions each has some layers."""
    size = 900, 64
    plan = plan_of(size, batch_size=2, machine=small_machine(2, 2**30))
    question = plan.question

    def on(memory_bytes: int) -> SweptStep | None:
        machine = small_machine(2, memory_bytes)
        return swept(replace(plan, question=replace(question, machine=machine, reserve=0)))

    alone = on(2**40)
    assert alone is not None
    assert len(alone.balance) == 1
    step = on(alone.device_bytes - 1)
    assert step is not None
    assert len(step.balance) == 2
    assert on(step.device_bytes) == step
    layers = question.layers
    one = Estimator(replace(question, halo_mode="exchange", grid=None))
    peaks = partition_peaks(layers, *size, step.strip_rows, 4, step.balance)
    first = step.balance[0]
    weights = [
        4 * sum(layer.num_parameters for layer in part) for part in (layers[:first], layers[first:])
    ]
    fixed = [4 * weights[0] + prod(size) * 3 * 4, 4 * weights[1]]
    assert step.device_bytes == max(map(sum, zip(fixed, peaks, strict=True)))
    times = [2 * time.forward_s + time.backward_s for time in one.times((1, *size))]
    strips = sum(1 for _ in sweep(layers, strip_edges(size[0], step.strip_rows)))
    seconds = 2 * max(sum(times[:first]), sum(times[first:])) / (1 - idle_share(strips, 2))
    assert step.step_s == pytest.approx(seconds + one.least_rest_s(2), rel=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"options": replace(OPTIONS, padding="valid")},
        {"options": replace(OPTIONS, norm="instance")},
        {"options": replace(OPTIONS, norm="instance", norm_scope="tile")},
        {"halo": "epsilon"},
        {"grid": (1, 1)},
        {"image": (90, 4), "nodes": 3},
    ],
)
def test_what_is_not_swept(changes: dict[str, Any]) -> None:
    assert swept(plan_of(**{"grid": (2, 2)} | changes)) is None


def test_what_does_not_fit_is_not_said() -> None:
    plan = plan_of()
    step = swept(plan)
    assert step is not None

    def on(memory_bytes: int) -> Plan:
        return replace(
            plan, question=replace(plan.question, machine=small_machine(3, memory_bytes), reserve=0)
        )

    assert swept(on(step.device_bytes)) == step
    assert swept(on(step.device_bytes - 1)) is None


def test_both_are_said() -> None:
    text = explain([plan_of()])
    assert "instead of     halo_mode exchange, 1 × 3 tiles, 1 partition" in text
    assert "instead of     halo_mode sweep, strips of 64 × 24 px at most: " in text
