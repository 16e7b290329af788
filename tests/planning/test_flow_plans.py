"""Plans of one forward, one backward: the fastest that fits, and what they refuse."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from questions import check_bounds, every_plan, small_machine, small_question

from tilenet.errors import TilenetError
from tilenet.geometry.unet import UNetOptions
from tilenet.planning.explain import answer
from tilenet.planning.halo_modes import plan_modes
from tilenet.planning.machines.read import machine
from tilenet.planning.memory.flow import flow_bytes
from tilenet.planning.plan import Plan, Question
from tilenet.planning.search import Search
from tilenet.planning.time.layer_time import LayerTime

pytestmark = pytest.mark.usefixtures("fewer_layouts")

SEEDS = [1, 5, 7, 9, 11, 13]  # norms of tiles, or none


@cache
def searched(seed: int) -> Search:
    question = small_question(seed)
    devices = replace(question.machine, devices_per_node=2 + seed % 3)
    more: Any = {"pipeline": "1f1b", "swap": "off", "halo_mode": "overlap", "machine": devices}
    return Search(replace(question, partitions=None, balance=None, **more))


@cache
def planned(seed: int) -> list[Plan]:
    return every_plan(searched(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_are_those_of_all_layouts(seed: int) -> None:
    search = searched(seed)
    wanted = planned(seed)
    assert search.best(4) == wanted[:4]
    for plan in wanted:
        layout = plan.layout
        assert layout.flows
        assert plan.run_keys()["pipeline"] == "1f1b"
        assert layout.micro_batches <= layout.partitions > 1
        assert plan.device_bytes <= search.question.limit_bytes
        parts = flow_bytes(
            search.estimator.costs((plan.stacked, *plan.tile_read_px)),
            plan.balance,
            layout.micro_batches,
            layout.checkpointing,
            search.question.optimizer,
            plan.sharers,
        )
        assert [part.num_bytes for part in plan.parts] == [part.total for part in parts]


def test_memory_decides_in_some_of_these_questions() -> None:
    shares = [len(planned(seed)) / len(list(searched(seed).layouts())) for seed in SEEDS]
    assert any(0 < share < 1 for share in shares)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_balance_beats_the_bounds(seed: int) -> None:
    check_bounds(searched(seed), seed)


def test_the_slowest_partition_computes_while_others_do() -> None:
    """A step of two micro-batches takes as long as it, though each goes through all of them."""
    options = UNetOptions(2, convolutions=1, base=6, bands=1, classes=6, upsampling="transposed")
    more: Any = {"micro_batches": 2, "checkpointing": "never", "pipeline": "1f1b"}
    asked = Question(options, 6, (130, 64), small_machine(4, 1_461_050), optimizer="sgd", **more)
    search = Search(asked)
    wanted = every_plan(search)
    assert search.best(2) == wanted[:2]
    check_bounds(search, 0)


LARGE = Question(
    UNetOptions(3, base=16, bands=4, classes=2),
    0,
    (512, 512),
    replace(machine("summit"), memory_bytes=2 << 28, file_bandwidth=1e12),
    num_images=64,
    batch_size=48,
    partitions=3,
    halo_mode="overlap",
)


@pytest.mark.parametrize(
    ("norm", "mode", "checkpointing"),
    [
        ("none", "overlap", "never"),
        ("none", "exchange", "always"),
        ("instance", "overlap", "always"),
        ("group", "exchange", "never"),
    ],
)
def test_what_layers_wait_for_other_ranks_is_counted(
    norm: Any, mode: Any, checkpointing: Any
) -> None:
    """Whole in the partitions' seconds, and in those of a step as far as no other hides it."""
    options = UNetOptions(2, base=8, bands=4, classes=2, norm=norm)
    more: Any = {"batch_size": 5, "nodes": 2, "checkpointing": checkpointing}
    more["grid"], more["micro_batches"] = (2, 2), 3
    question = replace(LARGE, options=options, pipeline="1f1b", halo_mode=mode, **more)
    (plan,) = plan_modes(question, alone=True)
    assert plan.layout.flows
    assert plan.halo_mode == mode
    assert plan.mesh[1] * plan.mesh[2] == 4
    waits = mode == "exchange" or norm != "none"
    assert waits == (plan.exchange_s > 0)
    search = Search(question)
    estimator, layout, many = search.estimator, plan.layout, 5
    busy_s = sum(estimator.timeline(layout, plan.balance, many).busy_s)
    free = [LayerTime(0.0, 0.0)] * len(estimator.layers)
    estimator.waits = lambda layout: free  # type: ignore[method-assign]
    rest_s = sum(estimator.timeline(layout, plan.balance, many).busy_s)
    assert busy_s - rest_s == pytest.approx(plan.exchange_s, rel=1e-9)
    hidden_s = plan.exchange_s - (plan.pipeline_s - estimator.step_s(layout, plan.balance)[1])
    assert 0 < hidden_s < plan.exchange_s if waits else hidden_s == 0


def test_it_waits_less_and_holds_less_than_gpipe() -> None:
    """Where memory holds few micro-batches of the step at once."""
    asked = [replace(LARGE, pipeline=name) for name in ("gpipe", "1f1b")]  # type: ignore[arg-type]
    (gpipe,), (flow,) = (plan_modes(question, alone=True) for question in asked)
    assert flow.layout.micro_batches <= 3
    assert flow.step_s < gpipe.step_s
    assert flow.bubble < gpipe.bubble


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"partitions": 1}, "partitions: 1"),
        ({"checkpointing": "except_last"}, "checkpointing: except_last"),
        ({"swap": "auto"}, "swap: auto"),
        ({"options": UNetOptions(2, base=4, norm="batch")}, "over whole images: batch norm"),
    ],
    ids=str,
)
def test_what_needs_gpipe_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(TilenetError, match=rf"pipeline: 1f1b, {said}\); use pipeline: gpipe"):
        answer(replace(LARGE, pipeline="1f1b", **more))


def test_a_sweep_is_refused() -> None:
    with pytest.raises(TilenetError, match=r"halo_mode: sweep, pipeline: 1f1b\); leave pipeline"):
        answer(replace(LARGE, pipeline="1f1b", halo_mode="sweep"))
