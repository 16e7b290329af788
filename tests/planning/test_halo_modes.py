"""Which halo mode a plan takes, what it says of the others, and what a plan by sweeps predicts."""

from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from questions import small_machine, small_question

from tilenet.errors import TilenetError
from tilenet.geometry.halo import context_of
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.layers import Conv, GlobalPool, Join, Layer, Stash
from tilenet.geometry.maps import map_shapes
from tilenet.geometry.sweep import strip_edges, sweep
from tilenet.geometry.tiles import Cut, cut
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.parallel.exchange.swept_partitions import idle_share
from tilenet.planning.compatibility import obstacle
from tilenet.planning.estimate import Estimator
from tilenet.planning.explain import answer, explain
from tilenet.planning.fitting import find_first, find_fitting
from tilenet.planning.halo_modes import FASTER, plan_modes
from tilenet.planning.memory.sweeps.swept_partitions import partition_peaks
from tilenet.planning.memory.sweeps.trained_sweeps import plan_sweeps, trained_bytes
from tilenet.planning.plan import MODES, OwnNetwork, Plan, Question
from tilenet.planning.search import Search
from tilenet.planning.swept_plan import swept_plans
from tilenet.planning.time.messages import halo_times

pytestmark = pytest.mark.usefixtures("fewer_layouts")
LABEL_BYTES = 2  # of a pixel, until the loss takes it
OPTIONS = UNetOptions(poolings=1, convolutions=1, base=4, bands=3, classes=2)
AVERAGING: tuple[Layer, ...] = (
    *(Conv(3, 4, padding=1), Stash(4, 4, "map"), GlobalPool(4, 4)),
    *(Join(4, 4, ("map",), "multiply", 1), Conv(4, 2, padding=1)),
)
SWEPT = Question(OPTIONS, 3, (90, 71), small_machine(3, 2**26), halo_mode="sweep", partitions=1)


def plans_of(**changes: Any) -> list[Plan]:
    tiled = {"partitions": 1, "grid": (3, 3)} | changes
    return plan_modes(replace(SWEPT, **{"halo_mode": "overlap"} | tiled))


@pytest.mark.parametrize("seed", [0, 32, 36, 47, 48, 65, 117])  # overlap, exchange or none is best
def test_auto_takes_the_fastest_that_is_trained(seed: int) -> None:
    question = replace(small_question(seed), halo="exact", halo_mode="auto")
    fastest = {mode: find_first(replace(question, halo_mode=mode)) for mode in MODES}
    trained = {
        mode: plan
        for mode, plan in fastest.items()
        if plan and not obstacle(question.layers, plan.layout.grid, plan.mesh, mode)
    }
    if not any(fastest.values()):
        with pytest.raises(TilenetError):
            plan_modes(question)
        return
    overlap = trained.get("overlap")
    plans = plan_modes(question)
    if overlap and overlap.layout.grid == (1, 1):
        assert {plan.halo_mode for plan in plans} == {"overlap"}
        return
    seconds = {mode: plan.step_s for mode, plan in trained.items()}
    best = min(seconds, key=lambda mode: seconds[mode]) if seconds else plans[0].halo_mode
    if overlap and seconds[best] >= FASTER * overlap.step_s:
        best = "overlap"
    assert plans[0].halo_mode == best
    others = [plan for plan in plans if plan.halo_mode != best]
    assert {plan.halo_mode for plan in others} == trained.keys() - {best}
    assert all(plan.step_s == seconds[plan.halo_mode] for plan in others)


@pytest.mark.parametrize(
    ("mib", "message_s", "mode", "others"),
    [
        (16, 1e-7, "exchange", ["overlap", "sweep"]),
        (16, 1e-3, "overlap", ["exchange", "sweep"]),
        (8, 1e-7, "sweep", ["overlap"]),
        (3, 1e-7, "sweep", []),
    ],
)
def test_memory_and_messages_decide(
    mib: int, message_s: float, mode: str, others: list[str]
) -> None:
    machine = replace(small_machine(4, mib << 20), message_s=message_s, latency_s=1e-7)
    network = replace(OPTIONS, poolings=2, convolutions=2)
    question = replace(SWEPT, options=network, image=(600, 300), machine=machine)
    question = replace(question, halo_mode="auto")
    first, *rest = plan_modes(question)
    assert first.halo_mode == mode
    assert [plan.halo_mode for plan in rest if plan.halo_mode != mode] == others
    (alone,) = plan_modes(question, alone=True)
    assert alone == first


@pytest.mark.parametrize("seed", [6, 14, 32, 34])
def test_next_to_overlap_stands_the_fastest_plan_that_exchanges(seed: int) -> None:
    question = replace(small_question(seed), halo="exact")
    plans = plan_modes(question)
    exchange = [plan for plan in plans if plan.halo_mode == "exchange"]
    others = []
    with suppress(TilenetError):  # tiles are too small
        others = Search(replace(question, halo_mode="exchange")).best(1)
    padding = question.options.padding  # type: ignore[union-attr]
    if plans[0].layout.grid == (1, 1) or padding == "valid" or not others:
        assert not exchange
    else:
        assert [plan.step_s for plan in exchange] == [others[0].step_s]


def seconds_of(question: Question, width: int, strip_rows: int, ranks: int) -> list[float]:
    """Seconds of each layer in a step of one image, computed and waited for."""
    layers, (height, _) = question.layers, question.image
    estimator = Estimator(question)
    strips = sum(1 for _ in sweep(layers, strip_edges(height, strip_rows)))
    rule = HaloRule(0, context_of(layers).alignment_px, exchanged=True)
    tiling = cut(*question.image, Cut(grid=(1, ranks)), rule)
    waits = halo_times(layers, tiling, 4, estimator.link(1), strips)
    times = estimator.times((1, height, width))
    return [
        2 * (time.forward_s + wait.forward_s) + time.backward_s + wait.backward_s
        for time, wait in zip(times, waits, strict=True)
    ]


@pytest.mark.parametrize(("batch_size", "width", "images"), [(1, 24, 1), (3, 72, 1), (4, 24, 4)])
def test_a_plan_by_sweeps(batch_size: int, width: int, images: int) -> None:
    """On three ranks 71 columns are 72: three ranks share an image, or have one each."""
    question = replace(SWEPT, batch_size=batch_size)
    (plan,) = swept_plans(question)
    rows = plan_sweeps(question.layers, 90, width, 4).edges[1]
    assert (plan.tile_own_px, plan.layout.strip_rows) == ((90, width), rows)
    assert plan.mesh == ((1, 1, 3) if width == 24 else (3, 1, 1))
    weights = 4 * sum(layer.num_parameters for layer in question.layers)
    tensors = trained_bytes(question.layers, 90, width, rows, 4)
    assert plan.device_bytes == tensors + 4 * weights + 90 * width * (3 * 4 + LABEL_BYTES)
    seconds = images * sum(seconds_of(question, width, rows, plan.mesh[2]))
    assert plan.step_s == pytest.approx(seconds + Estimator(question).least_rest_s(1), rel=1e-12)
    assert (plan.exchange_s > 0) == (plan.mesh[2] > 1)


def test_strips_have_messages_of_their_own() -> None:
    layers, link = unet_layers(OPTIONS), Estimator(SWEPT).link(1)
    tiling = cut(90, 72, Cut(grid=(1, 3)), HaloRule(0, 2, exchanged=True))
    once, often = (halo_times(layers, tiling, 4, link, parts) for parts in (1, 5))
    for layer, more in zip(once, often, strict=True):
        # A rank in the middle sends to two and takes from two.
        message_s = link.latency_s + 4 * link.message_s if layer.forward_s else 0.0
        assert more.forward_s == pytest.approx(layer.forward_s + 4 * message_s, rel=1e-12)


def test_strips_over_partitions_where_a_rank_per_device_does_not_fit() -> None:
    """Of two images each device would have one; of partitions each has some layers."""
    size = 900, 64
    question = replace(
        SWEPT, image=size, batch_size=2, machine=small_machine(2, 2**30), partitions=None
    )

    def on(memory_bytes: int) -> Plan | None:
        return find_first(replace(question, machine=small_machine(2, memory_bytes), reserve=0))

    alone = on(2**40)
    assert alone is not None
    assert len(alone.balance) == 1
    plan = on(alone.device_bytes - 1)
    assert plan is not None
    assert len(plan.balance) == 2
    again = on(plan.device_bytes)
    assert again is not None
    assert again.balance == plan.balance
    layers, strip_rows = question.layers, plan.layout.strip_rows
    assert strip_rows is not None
    peaks = partition_peaks(layers, *size, strip_rows, 4, plan.balance)
    first = plan.balance[0]
    weights = [
        4 * sum(layer.num_parameters for layer in part) for part in (layers[:first], layers[first:])
    ]
    fixed = [4 * weights[0] + prod(size) * 3 * 4, 4 * weights[1] + prod(size) * LABEL_BYTES]
    assert [part.num_bytes for part in plan.parts] == [
        states + peak for states, peak in zip(fixed, peaks, strict=True)
    ]
    times = seconds_of(question, 64, strip_rows, 1)
    strips = sum(1 for _ in sweep(layers, strip_edges(size[0], strip_rows)))
    assert plan.bubble == pytest.approx(idle_share(strips, 2), rel=1e-12)
    estimator = Estimator(question)
    # The map comes twice over the boundary, its gradient once.
    move_s = map_shapes(layers, *size)[first].num_elements * 4 / (2e9 * 0.8)
    busiest_s = max(sum(times[:first]) + move_s, sum(times[first:]) + 2 * move_s)
    seconds = 2 * busiest_s / (1 - plan.bubble)
    rest_s = estimator.sum_s(2) + estimator.update_s(plan.balance)
    assert plan.step_s == pytest.approx(seconds + rest_s, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"options": replace(OPTIONS, padding="valid")}, "padding: valid"),
        ({"options": replace(OPTIONS, norm="instance")}, "tiles: instance norm"),
        ({"options": replace(OPTIONS, norm="batch", norm_scope="tile")}, "tiles: norms"),
        ({"halo": "epsilon"}, "halo: epsilon"),
        ({"grid": (2, 2)}, "grid: (2, 2)"),
        ({"tile_px": 32}, "tile_px: 32"),
        ({"micro_batches": 2}, "micro_batches: 2"),
        ({"checkpointing": "always"}, "checkpointing: always"),
        ({"swap": "all"}, "swap: all"),
        ({"balance": (3, 4)}, "balance"),
        ({"partitions": 4}, "devices per node of toy: 3"),
        ({"partitions": 4, "halo_mode": "auto"}, "devices per node of toy: 3"),
        ({"batch_size": 0, "halo_mode": "auto"}, "batch_size: 0"),
        ({"reserve": 1.5}, "reserve: 1.5"),
    ],
)
def test_what_is_not_swept(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TilenetError) as refusal:
        plan_modes(replace(SWEPT, **changes))
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_sweep_gives_all_ranks_of_an_image_columns() -> None:
    """Of four ranks, which exchange as 2 × 2."""
    question = replace(SWEPT, machine=small_machine(4, 2**26))
    meshes = {mode: find_first(replace(question, halo_mode=mode)) for mode in MODES[1:]}
    assert {mode: plan and plan.mesh for mode, plan in meshes.items()} == {
        "exchange": (1, 2, 2),
        "sweep": (1, 1, 4),
    }


def test_what_train_refuses_is_not_taken() -> None:
    """Ranks as 2 × 2 each need a tile for an average, of which one row of pixels has too few."""
    machine = replace(small_machine(4, 2**26), message_s=1e-2)
    network = OwnNetwork("averaging", AVERAGING)
    question = replace(SWEPT, options=network, image=(1, 301), machine=machine, halo_mode="auto")
    overlap = find_first(replace(question, halo_mode="overlap"))
    assert overlap is not None
    assert obstacle(AVERAGING, overlap.layout.grid, overlap.mesh) is not None
    first, *_ = plan_modes(question)
    assert first.halo_mode == "sweep"
    assert first.step_s > overlap.step_s


def test_a_sweep_needs_a_column_per_rank() -> None:
    narrow = replace(SWEPT, image=(90, 4))
    with pytest.raises(TilenetError, match=r"90 × 4 px, columns in multiples of 2 .* image: 3\)"):
        plan_modes(narrow)
    assert plan_modes(replace(narrow, halo_mode="auto"))[0].halo_mode == "overlap"
    (plan,) = swept_plans(replace(narrow, batch_size=3))
    assert plan.mesh == (3, 1, 1)


def test_averages_whose_maps_do_not_fit_are_said() -> None:
    asked = replace(SWEPT, options=OwnNetwork("averaging", AVERAGING), image=(900, 900))

    def on(memory_bytes: int) -> list[Plan]:
        return plan_modes(replace(asked, machine=small_machine(1, memory_bytes)))

    assert on(2**30)[0].layout.partitions == 1
    with pytest.raises(TilenetError, match=r"they must fit a device .*plan with: 0\.0 GiB"):
        on(2**24)


def test_a_sweep_that_does_not_fit_says_what_it_needs() -> None:
    (plan,) = swept_plans(SWEPT)

    def on(memory_bytes: int) -> list[Plan]:
        machine = small_machine(3, memory_bytes)
        return plan_modes(replace(SWEPT, machine=machine, reserve=0))

    assert on(plan.device_bytes)[0].layout == plan.layout
    with pytest.raises(TilenetError, match=r"a plan must fit its devices .* 1 × 3 tiles in strips"):
        on(plan.device_bytes - 1)


def test_nothing_is_searched_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Question] = []

    def fitting(question: Question, *, alone: bool = False) -> list[Plan]:
        searched.append(question)
        return find_fitting(question, alone=alone)

    monkeypatch.setattr("tilenet.planning.halo_modes.find_fitting", fitting)
    monkeypatch.setattr("tilenet.planning.fitting.find_fitting", fitting)
    network = replace(OPTIONS, poolings=2, convolutions=2)
    machine = small_machine(4, 3 << 20)
    asked = replace(SWEPT, options=network, image=(600, 300), machine=machine, partitions=None)
    plans = plan_modes(replace(asked, halo_mode="auto"))
    assert plans[0].halo_mode == "sweep"
    assert len(searched) == len(set(map(str, searched)))


def test_bytes_of_half_precision() -> None:
    """Maps and labels are of two bytes, image and weights of four."""
    (plan,) = swept_plans(replace(SWEPT, precision="bfloat16"))
    weights = 4 * sum(layer.num_parameters for layer in SWEPT.layers)
    assert plan.layout.strip_rows is not None
    tensors = trained_bytes(SWEPT.layers, 90, 24, plan.layout.strip_rows, 2)
    assert plan.device_bytes == tensors + 4 * weights + 90 * 24 * (3 * 4 + LABEL_BYTES)


def test_exchange_takes_no_halo_of_its_own() -> None:
    with pytest.raises(TilenetError, match=r"halo: epsilon.*; leave halo out"):
        plan_modes(replace(SWEPT, halo_mode="exchange", halo="epsilon"))


@pytest.mark.parametrize("halo", ["epsilon", 2])
def test_only_tiles_that_overlap_have_another_halo(halo: str | int) -> None:
    plans = plans_of(halo=halo, halo_mode="auto", grid=None)
    assert {plan.halo_mode for plan in plans} == {"overlap"}


def test_tiles_that_are_asked_for_overlap() -> None:
    first, *others = plans_of(halo_mode="auto")
    assert (first.halo_mode, first.layout.grid) == ("overlap", (3, 3))
    assert [plan.halo_mode for plan in others] == ["exchange", "sweep"]


def test_tiles_that_fit_ranks_of_fewer_partitions_are_exchanged() -> None:
    machine = replace(small_machine(4, 2**26), message_s=1e-7, latency_s=1e-7)
    network = replace(OPTIONS, poolings=2, convolutions=2)
    changes = {"machine": machine, "options": network, "image": (600, 300), "partitions": None}
    first, *_ = plans_of(halo_mode="auto", grid=(2, 2), **changes)
    assert (first.halo_mode, first.layout.grid, first.layout.partitions) == ("exchange", (2, 2), 1)


def test_both_are_said() -> None:
    text = explain(plans_of())
    assert "instead of     halo_mode exchange, 1 × 3 tiles, 1 partition" in text
    strips = "1 × 1 tiles in strips of 64 rows, 3 partitions (balance 6, 3, 2)"
    assert f"instead of     halo_mode sweep, {strips}: " in text


@pytest.mark.parametrize(
    ("partitions", "width", "halo"), [(1, 24, "halo exchanged between ranks"), (3, 72, "no halo")]
)
def test_a_plan_by_sweeps_in_words(partitions: int, width: int, halo: str) -> None:
    text = explain(answer(replace(SWEPT, partitions=partitions)))
    strips = f"in strips of 64 × {width} px at most, each computed twice forward"
    assert f"1 tile per rank, {strips}" in text
    assert f", {halo}; work ratio 1.01" in text


def test_a_balance_says_the_number_of_partitions() -> None:
    question = replace(SWEPT, partitions=None, balance=(4, 4, 3))
    assert question.partitions == 3
    assert {plan.layout.partitions for plan in plan_modes(question)} == {3, 1}


def test_keys_of_a_sweep() -> None:
    keys = plan_modes(SWEPT)[0].run_keys()
    assert "tiles" not in keys
    assert keys["mesh"] == {"replicas": 1, "rows": 1, "columns": 3}
    assert (keys["halo_mode"], keys["halo"], keys["balance"]) == ("sweep", "exact", [11])
