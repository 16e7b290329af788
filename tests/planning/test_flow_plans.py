"""Plans of one forward, one backward: the fastest that fits, and what they refuse."""

from dataclasses import replace
from typing import Any

import pytest
from questions import every_balance, every_plan, small_question

from tilenet.errors import TilenetError
from tilenet.geometry.unet import UNetOptions
from tilenet.planning.explain import answer
from tilenet.planning.machines import machine
from tilenet.planning.memory.flow import flow_bytes
from tilenet.planning.plan import Question
from tilenet.planning.search import Search

pytestmark = pytest.mark.usefixtures("fewer_layouts")

SEEDS = [1, 5, 7, 9, 11, 13]  # norms of tiles, or none


def searched(seed: int) -> Search:
    question = small_question(seed)
    devices = replace(question.machine, devices_per_node=2 + seed % 3)
    more: Any = {"pipeline": "1f1b", "swap": "off", "halo_mode": "overlap", "machine": devices}
    return Search(replace(question, partitions=None, balance=None, **more))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_are_those_of_all_layouts(seed: int) -> None:
    search = searched(seed)
    wanted = every_plan(search)
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
    shares = [
        len(every_plan(search)) / len(list(search.layouts())) for search in map(searched, SEEDS)
    ]
    assert any(0 < share < 1 for share in shares)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_balance_beats_the_bounds(seed: int) -> None:
    search = searched(seed)
    for layout in list(search.layouts())[::5]:
        endless = search.bounds.seconds(layout)
        fitting = search.bounds.seconds_that_fit(layout)
        assert endless <= fitting
        balances = every_balance(len(search.estimator.layers), layout.partitions)
        for balance in balances[:: max(1, len(balances) // 6)]:
            step_s = search.estimator.step_s(layout, balance)[0]
            assert endless <= step_s * (1 + 1e-12)
            if search.estimator.num_bytes(layout, balance) <= search.question.limit_bytes:
                assert fitting <= step_s * (1 + 1e-12)


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


def test_it_waits_less_and_holds_less_than_gpipe() -> None:
    """Where memory holds few micro-batches of the step at once."""
    gpipe, flow = (answer(replace(LARGE, pipeline=name))[0] for name in ("gpipe", "1f1b"))  # type: ignore[arg-type]
    assert flow.layout.micro_batches <= 3
    assert flow.step_s < gpipe.step_s
    assert flow.bubble < gpipe.bubble


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"partitions": 1}, "partitions: 1"),
        ({"checkpointing": "except_last"}, "checkpointing: except_last"),
        ({"swap": "auto"}, "swap: auto"),
        ({"halo_mode": "exchange"}, "halo_mode: exchange"),
        (
            {"options": UNetOptions(2, base=4, norm="group"), "nodes": 2, "batch_size": 1},
            "over whole images: group norm",
        ),
    ],
    ids=str,
)
def test_what_needs_gpipe_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(TilenetError, match=rf"pipeline: 1f1b, {said}\); use pipeline: gpipe"):
        answer(replace(LARGE, pipeline="1f1b", **more))


def test_a_sweep_is_refused() -> None:
    with pytest.raises(TilenetError, match=r"halo_mode: sweep, pipeline: 1f1b\); leave pipeline"):
        answer(replace(LARGE, pipeline="1f1b", halo_mode="sweep"))
