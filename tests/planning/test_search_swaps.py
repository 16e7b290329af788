"""Plans that swap: only where that is faster or nothing else fits, and never beyond a limit."""

from dataclasses import replace
from itertools import pairwise

import pytest
from questions import small_question

from tilenet.planning.plan import Plan, Question
from tilenet.planning.search import Search

SEEDS = range(10, 24)


@pytest.fixture(autouse=True)
def small_tensors(fewer_layouts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilenet.planning.estimate.MIN_BYTES", 0)


def best(question: Question) -> Plan | None:
    return next(iter(Search(question).best(1)), None)


def faster_link(question: Question, bandwidth: float) -> Question:
    return replace(question, machine=replace(question.machine, host_bandwidth=bandwidth))


def test_auto_is_never_slower() -> None:
    swapped = 0
    for seed in SEEDS:
        question = faster_link(small_question(seed), 3e10)
        plain = best(question)
        auto = best(replace(question, swap="auto"))
        if plain is not None:
            assert auto.step_s <= plain.step_s
        if auto is None:
            continue
        check(question, auto)
        swapped += auto.layout.swap
    assert swapped >= 1


def test_auto_fits_where_nothing_else_does() -> None:
    fitting = 0
    for seed in SEEDS:
        question = small_question(seed)
        needed = Search(question).leanest().device_bytes / (1 - question.reserve)
        tight = replace(question.machine, memory_bytes=int(0.9 * needed))
        question = replace(question, machine=tight)
        assert best(question) is None
        auto = best(replace(question, swap="auto"))
        if auto is not None:
            assert auto.layout.swap
            check(question, auto)
            fitting += 1
    assert fitting >= 3


def check(question: Question, auto: Plan) -> None:
    assert auto.device_bytes <= question.limit_bytes
    assert auto.layout.swap == (auto.swaps is not None)
    if not auto.layout.swap:
        assert auto.run_keys()["swap"] == "off"
        return
    assert not auto.swaps.idle
    estimator = Search(question).estimator
    without = estimator.host_bytes(auto.layout, 0)
    assert auto.host_bytes - without == auto.ranks_per_node * auto.swaps.swapped_bytes
    assert auto.swap_overhead >= 0
    assert auto.run_keys()["swap"] == "auto"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_is_that_of_all_layouts(seed: int) -> None:
    search = Search(replace(small_question(seed), swap="auto"))
    plans = [plan for layout in search.layouts() if (plan := search.plan(layout)) is not None]
    found = search.best(1)
    assert [plan.step_s for plan in found] == sorted(plan.step_s for plan in plans)[:1]


def test_a_faster_link_never_makes_a_step_slower() -> None:
    gains = []
    for seed in SEEDS:
        question = replace(small_question(seed), swap="auto")
        seconds = [
            plan.step_s if (plan := best(faster_link(question, bandwidth))) else None
            for bandwidth in (1e7, 1e9, 1e12)
        ]
        if None in seconds:
            assert seconds == [None] * 3
            continue
        for slow, fast in pairwise(seconds):
            assert fast <= 1.06 * slow  # the policy is within some per cent of the best
        gains.append(seconds[0] / seconds[-1])
    assert max(gains) > 1.2


def test_what_is_swapped_must_fit_the_host() -> None:
    for seed in SEEDS:
        question = replace(small_question(seed), swap="auto")
        plan = best(question)
        if plan is None or plan.swaps is None or not plan.swaps.swapped_bytes:
            continue
        tight = replace(question.machine, host_bytes=plan.host_bytes - 1)
        other = best(replace(question, machine=tight))
        assert other is None or other.host_bytes < plan.host_bytes or not other.layout.swap
        return
    raise AssertionError("no plan swaps")


@pytest.mark.parametrize("seed", SEEDS)
def test_all_swaps_whatever_fits(seed: int) -> None:
    question = small_question(seed)
    plan = best(replace(question, swap="all"))
    if plan is None:
        assert best(replace(question, swap="auto")) is None or question.limit_bytes < 2**19
        return
    assert plan.layout.swap
    assert plan.run_keys()["swap"] == "all"
    actions = {action for part in plan.swaps.partitions for action in part.actions}
    assert actions == ({"swap"} if plan.layout.checkpointing == "never" else {"keep"})
