"""The search finds what trying everything finds, keeps to what is asked, and swaps in need."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from questions import check_bounds, every_balance, every_plan, small_machine, small_question

from tilenet.errors import TilenetError
from tilenet.geometry.unet import UNetOptions
from tilenet.planning import swept_plan
from tilenet.planning.compatibility import whole_image
from tilenet.planning.fitting import find_fitting
from tilenet.planning.memory import states
from tilenet.planning.memory.partition import partition_bytes
from tilenet.planning.mesh import MeshShape, tiles_of
from tilenet.planning.plan import Plan, Question, round_seconds
from tilenet.planning.search import Search

pytestmark = pytest.mark.usefixtures("fewer_layouts", "small_tensors")

SEEDS = 1, 4, 7, 9, 11, 19, 36, 37, 38, 48  # of many layouts that fit, few, or none


@pytest.fixture(autouse=True)
def some_share_out_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "WORTH_BYTES", 30_000)


@cache
def searched(seed: int) -> Search:
    return Search(small_question(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_are_those_of_all_layouts(seed: int) -> None:
    search = searched(seed)
    wanted = every_plan(search)
    for count in (1, 3, 8):
        found = search.best(count)
        assert found == wanted[:count]
        assert len({plan.layout for plan in found}) == len(found)


def test_memory_decides_in_some_of_these_questions_and_forbids_all_in_others() -> None:
    share = [
        len(every_plan(searched(seed))) / len(list(searched(seed).layouts())) for seed in SEEDS
    ]
    assert share.count(0) > 0
    assert sum(0 < value < 1 for value in share) > 5


@pytest.mark.parametrize("seed", SEEDS)
def test_no_balance_of_any_layout_beats_the_bounds(seed: int) -> None:
    check_bounds(searched(seed), seed)


def test_the_bounds_of_seconds_count_reading() -> None:
    """Where files are slow reading decides, and only layouts that read least are planned."""
    slow = replace(ROOMY, machine=replace(ROOMY.machine, file_bandwidth=1e3))
    search = Search(slow)
    (plan,) = search.best(1)
    assert plan.step_s == plan.read_s
    planned = search.planned.cache_info().currsize
    assert planned < len(list(search.layouts())) / 4


def test_of_equally_fast_plans_few_partitions_win_and_then_few_bytes() -> None:
    """Where reading decides, all layouts with the same tiles are equally fast."""
    slow = replace(ROOMY, grid=(4, 4), machine=replace(ROOMY.machine, file_bandwidth=1e3))
    search = Search(slow)
    wanted = every_plan(search)
    assert len({plan.step_s for plan in wanted}) == 1
    counts = [plan.layout.partitions for plan in wanted]
    assert counts == sorted(counts)
    assert set(counts) == {1, 2, 4}
    assert wanted[0].device_bytes > min(plan.device_bytes for plan in wanted)
    assert search.best(len(wanted)) == wanted


def test_seconds_are_equal_to_nine_digits() -> None:
    assert 0.1 + 0.2 != 0.3
    assert round_seconds(0.1 + 0.2) == round_seconds(0.3) == 0.3
    assert round_seconds(1.00000001) != round_seconds(1.0)
    assert round_seconds(inf) == inf


@pytest.mark.parametrize("seed", SEEDS[::4])
def test_the_balance_of_a_layout_is_hardly_slower_than_the_best_of_all(seed: int) -> None:
    search = searched(seed)
    layouts = [layout for layout in search.layouts() if layout.partitions < 4][::11]
    for layout in layouts:
        plan = search.plan(layout)
        steps = [
            search.estimator.step_s(layout, balance)[0]
            for balance in every_balance(len(search.estimator.layers), layout.partitions)
            if search.estimator.num_bytes(layout, balance) <= search.question.limit_bytes
        ]
        if plan is not None:
            assert min(steps) <= plan.step_s <= 1.1 * min(steps)


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_fit_and_add_up(seed: int) -> None:
    search = searched(seed)
    asked = search.question
    for plan in search.best(4):
        layers = search.estimator.layers
        assert plan.device_bytes <= asked.limit_bytes <= asked.machine.memory_bytes
        assert len(plan.balance) == plan.layout.partitions == len(plan.parts)
        assert sum(plan.balance) == len(layers)
        assert [part.layers for part in plan.parts] == list(plan.balance)
        assert sum(part.parameters for part in plan.parts) == sum(x.num_parameters for x in layers)
        assert sum(part.share for part in plan.parts) == pytest.approx(1)
        exact = partition_bytes(
            search.estimator.costs((plan.stacked, *plan.tile_read_px)),
            plan.balance,
            plan.layout.micro_batches,
            plan.layout.checkpointing,
            asked.optimizer,
            sharers=plan.sharers,
        )
        assert [part.num_bytes for part in plan.parts] == [part.total for part in exact]
        mesh = MeshShape(*plan.mesh)
        weights = sum(part.parameters for part in plan.parts) * 4
        worth = states.OPTIMIZER_STATES[asked.optimizer] * weights > states.WORTH_BYTES
        assert plan.sharers == (plan.num_ranks if worth else 1)
        assert mesh.num_ranks == plan.num_ranks == asked.nodes * plan.ranks_per_node
        assert plan.ranks_per_node * plan.layout.partitions <= asked.machine.devices_per_node
        dealt = [
            len(tiles_of(mesh.place(rank), mesh, plan.layout.grid))
            for rank in range(mesh.rows * mesh.columns)
        ]
        rows, cols = plan.layout.grid
        assert sum(dealt) == rows * cols
        images = -(-asked.batch_size // mesh.replicas)
        assert plan.tiles_per_rank == max(dealt) * images
        taken = max(dealt) if whole_image(layers) else 1
        assert plan.stacked == taken
        assert plan.layout.micro_batches <= plan.tiles_per_rank // taken
        assert plan.step_s >= plan.pipeline_s + plan.sum_s
        assert plan.epoch_s == pytest.approx(plan.step_s * -(-7 // asked.batch_size))
        assert 0 <= plan.bubble < 1
        assert plan.work_ratio >= 1


@pytest.mark.parametrize("seed", SEEDS[:12])
def test_rivals_differ_in_what_a_reader_sees(seed: int) -> None:
    search = searched(seed)
    plans = search.answer()
    assert plans[:1] == search.best(1)
    for rival in plans[1:]:
        assert rival.step_s >= plans[0].step_s
        assert rival.layout != plans[0].layout
    assert len({plan.layout for plan in plans}) == len(plans) <= 3


ROOMY = Question(
    UNetOptions(poolings=2, convolutions=1, base=4), 5, (300, 200), small_machine(4, 2**26)
)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"grid": (5, 3)}, {"grid": (5, 3)}),
        ({"partitions": 3}, {"partitions": 3}),
        ({"partitions": 2, "micro_batches": 3}, {"partitions": 2, "micro_batches": 3}),
        ({"checkpointing": "always"}, {"checkpointing": "always"}),
        ({"checkpointing": "except_last", "partitions": 4}, {"checkpointing": "except_last"}),
    ],
)
def test_what_is_fixed_stays_fixed(changes: dict[str, object], kept: dict[str, object]) -> None:
    plans = Search(replace(ROOMY, **changes)).best(5)  # type: ignore[arg-type]
    assert plans
    for plan in plans:
        assert {name: getattr(plan.layout, name) for name in kept} == kept


def test_a_balance_and_a_size_of_tiles_are_taken_as_they_are() -> None:
    count = len(Search(ROOMY).estimator.layers)
    balance = (3, count - 5, 2)
    plans = Search(replace(ROOMY, balance=balance, partitions=3)).best(4)
    assert len(plans) == 4
    assert all(plan.balance == balance for plan in plans)
    plans = Search(replace(ROOMY, tile_px=80)).best(4)
    assert {plan.layout.grid for plan in plans} == {(4, 3)}
    assert all(max(plan.tile_own_px) <= 80 for plan in plans)


def test_with_exchange_each_rank_holds_one_window_and_images_are_micro_batches() -> None:
    asked = replace(ROOMY, halo_mode="exchange", batch_size=6, nodes=3)
    for plan in Search(asked).best(6):
        assert plan.layout.grid == plan.mesh[1:]
        assert plan.tiles_per_rank == 6 / plan.mesh[0] >= plan.layout.micro_batches
        assert plan.work_ratio == 1
        assert plan.tile_read_px == plan.tile_own_px


@pytest.mark.parametrize(
    ("changes", "grids"),
    [
        ({}, {(2, 4): {1}, (2, 2): {2}, (1, 2): {4}, (1, 1): {8}}),
        ({"batch_size": 2}, {(2, 2): {1}, (1, 2): {2}, (1, 1): {4, 8}}),
        ({"grid": (2, 4)}, {(2, 4): {1}}),
        ({"grid": (1, 2)}, {(1, 2): {4}}),
        ({"grid": (1, 1), "batch_size": 2}, {(1, 1): {4, 8}}),
        ({"tile_px": 160}, {(2, 2): {2}}),
        ({"image": (8, 12)}, {(2, 2): {2}, (1, 2): {4}, (1, 1): {8}}),
    ],
)
def test_exchange_takes_the_partitions_whose_ranks_fit_the_tiles(
    changes: dict[str, Any], grids: dict[tuple[int, int], set[int]]
) -> None:
    """Of eight devices; images of 8 × 12 px have no four columns of four."""
    asked = replace(ROOMY, halo_mode="exchange", machine=small_machine(8, 2**26), **changes)
    search = Search(asked)
    counts: dict[tuple[int, int], set[int]] = {}
    for layout in search.layouts():
        counts.setdefault(layout.grid, set()).add(layout.partitions)
    assert counts == grids
    assert search.best(1)[0].layout.grid in grids


def test_more_memory_and_more_nodes_never_slow_a_plan() -> None:
    steps = [
        Search(replace(ROOMY, machine=small_machine(4, int(size)))).best(1)
        for size in (2**18, 2**19, 2**20, 2**23)
    ]
    seconds = [plans[0].step_s if plans else inf for plans in steps]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


NORMED = replace(ROOMY.options, norm="instance")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"balance": (3, 4), "partitions": 2}, r"must add up .*sum: 7, layers: \d+"),
        ({"balance": (3, 4), "partitions": 3}, "one entry a partition"),
        ({"balance": (0, 4), "partitions": 2}, "every partition needs a layer"),
        ({"partitions": 5}, r"\(partitions: 5, devices per node of toy: 4\); plan with at most 4$"),
        ({"partitions": 999}, "every partition needs a layer"),
        ({"partitions": 0}, r"partitions must be at least 1 \(partitions: 0\)"),
        ({"nodes": -2}, "nodes must be at least 1"),
        ({"micro_batches": 0}, "micro_batches must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"reserve": 1.0}, "reserve is a share"),
        ({"reserve": -0.1}, "reserve is a share"),
        ({"reserve": float("nan")}, r"reserve is a share .*\(reserve: nan\)"),
        ({"image": (0, 7)}, r"at least one pixel a side \(image: 0 × 7 px\)"),
        ({"grid": (2, 2), "partitions": 2, "micro_batches": 3}, r"3, of a rank: 2\); ask"),
        ({"grid": (2, 2), "partitions": 4, "micro_batches": 8}, r"micro-batches: 8, of a rank: 4"),
        (
            {"grid": (4, 4), "partitions": 4, "micro_batches": 2, "options": NORMED},
            r"stacks of tiles, for instance norm, as .*2, of a rank: 1\); ask for at most 1$",
        ),
        ({"image": (4, 4), "options": NORMED}, "more than one cell on every level"),
        ({"tile_px": 3}, "nearest legal tile: 4"),
        ({"grid": (100, 1)}, "at most 75 tiles are possible"),
        ({"halo": 7}, "a halo must be a multiple"),
        (
            {"halo_mode": "exchange", "grid": (3, 3)},
            r"\(tiles: 3 × 3, ranks of an image: 2 × 2, 1 × 2 or 1 × 1\); ask for as many tiles as",
        ),
        (
            {"halo_mode": "exchange", "grid": (2, 2), "partitions": 2},
            r"\(tiles: 2 × 2, ranks of an image: 1 × 2\)",
        ),
        (
            {"halo_mode": "exchange", "tile_px": 50},
            "tiles: 7 × 5, ranks of an image: .*leave the tiles out",
        ),
        (
            {"halo_mode": "exchange", "image": (4, 4), "options": NORMED},
            "more than one cell on every level",
        ),
        ({"halo_mode": "exchange", "image": (4, 4), "grid": (2, 2)}, "at most 1 tiles are"),
        ({"halo_mode": "exchange", "micro_batches": 3}, r"3, of a rank: 1\); ask for at most 1"),
        ({"grid": (2, 2), "micro_batches": 5}, r"micro-batches: 5, of a rank: 4\); ask"),
        ({"precision": "float16"}, "has no peak for precision float16"),
    ],
)
def test_impossible_questions_are_refused_in_a_sentence(
    changes: dict[str, object], said: str
) -> None:
    with pytest.raises(TilenetError, match=said) as refusal:
        Search(replace(ROOMY, **changes)).best()  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)


def test_ranks_of_intels_gpus_have_one_partition() -> None:
    """A run refuses several there (`choose_devices`), so no plan has them."""
    here = replace(ROOMY, machine=replace(ROOMY.machine, device="Intel Max 1550"))
    for question, counts in ((ROOMY, {1, 2, 4}), (here, {1})):
        assert {layout.partitions for layout in Search(question).layouts()} == counts
        sweep = replace(question, halo_mode="sweep")
        assert set(swept_plan._partitions(sweep)) == counts
    for mode in ("overlap", "sweep"):
        said = r"of CUDA or ROCm \(partitions: 2, devices of toy: Intel Max 1550\); plan with 1$"
        with pytest.raises(TilenetError, match=said):
            find_fitting(replace(here, halo_mode=mode, partitions=2))  # type: ignore[arg-type]
    with pytest.raises(TilenetError, match="1f1b"):
        find_fitting(replace(here, pipeline="1f1b"))


# --- plans that swap: only where that is faster or nothing else fits, never beyond a limit


SWAP_SEEDS = 22, 11, 13, 14, 17, 19, 21, 23  # in the first a plan swaps


@pytest.fixture
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilenet.planning.estimate.MIN_BYTES", 0)


def best(question: Question) -> Plan | None:
    return next(iter(Search(question).best(1)), None)


def faster_link(question: Question, bandwidth: float) -> Question:
    return replace(question, machine=replace(question.machine, host_bandwidth=bandwidth))


def test_auto_is_never_slower() -> None:
    swapped = 0
    for seed in SWAP_SEEDS:
        question = faster_link(small_question(seed), 3e10)
        plain = best(question)
        auto = best(replace(question, swap="auto"))
        if plain is not None:
            assert auto.step_s <= plain.step_s
        if auto is None:
            continue
        check_swaps(question, auto)
        swapped += auto.layout.swap
    assert swapped >= 1


def test_auto_fits_where_nothing_else_does() -> None:
    fitting = 0
    for seed in SWAP_SEEDS:
        question = small_question(seed)
        needed = Search(question).leanest().device_bytes / (1 - question.reserve)
        tight = replace(question.machine, memory_bytes=int(0.9 * needed))
        question = replace(question, machine=tight)
        assert best(question) is None
        auto = best(replace(question, swap="auto"))
        if auto is not None:
            assert auto.layout.swap
            check_swaps(question, auto)
            fitting += 1
    assert fitting >= 3


def check_swaps(question: Question, auto: Plan) -> None:
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
    keys = auto.run_keys()
    assert keys["swap"] == "auto"
    # Or the run would take the memory that it finds for its limit, and swap other layers.
    assert keys["swapping"] == {"device_gib": auto.question.limit_bytes / 2**30}
    assert "swapping" not in replace(auto, layout=replace(auto.layout, swap=False)).run_keys()


@pytest.mark.parametrize("seed", SWAP_SEEDS)
def test_the_best_that_swaps_is_that_of_all_layouts(seed: int) -> None:
    search = Search(replace(small_question(seed), swap="auto"))
    plans = [plan for layout in search.layouts() if (plan := search.plan(layout)) is not None]
    found = search.best(1)
    assert [plan.step_s for plan in found] == sorted(plan.step_s for plan in plans)[:1]


def test_a_faster_link_never_makes_a_step_slower() -> None:
    gains = []
    for seed in SWAP_SEEDS:
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
    for seed in SWAP_SEEDS:
        question = replace(small_question(seed), swap="auto")
        plan = best(question)
        if plan is None or plan.swaps is None or not plan.swaps.swapped_bytes:
            continue
        tight = replace(question.machine, host_bytes=plan.host_bytes - 1)
        other = best(replace(question, machine=tight))
        assert other is None or other.host_bytes < plan.host_bytes or not other.layout.swap
        return
    raise AssertionError("no plan swaps")


@pytest.mark.parametrize("seed", SWAP_SEEDS)
def test_all_swaps_whatever_fits(seed: int) -> None:
    question = small_question(seed)
    plan = best(replace(question, swap="all"))
    if plan is None:
        assert best(replace(question, swap="auto")) is None or question.limit_bytes < 2**19
        return
    assert plan.layout.swap
    assert plan.run_keys()["swap"] == "all"
    swapped = [part.layers for part in plan.swaps.partitions]
    all_of = list(plan.balance) if plan.layout.checkpointing == "never" else [0] * len(swapped)
    assert swapped == all_of
