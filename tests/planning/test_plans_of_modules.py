"""Plans of somebody's network: the search, what stays together, `plan.json` and the run with it."""

import json
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from questions import every_balance, small_machine, small_question
from zoo import ZOO

from tilenet.adoption.adopt import Adopted, adopt
from tilenet.errors import TilenetError
from tilenet.geometry.layers import Layer
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.planning.explain import answer, explain
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.partition import partition_bytes
from tilenet.planning.plan import OwnNetwork, Plan, Question, read_plan, write_plan
from tilenet.planning.replan import replan
from tilenet.planning.search import Search
from tilenet.training.config.read import read_run_file
from tilenet.training.setup.architecture import Architecture
from tilenet.training.setup.decide import plan_run

pytestmark = pytest.mark.usefixtures("fewer_layouts")

SEEDS = 3, 4, 8, 13, 14, 18  # of many layouts that fit, few, or none
NAMES = ("residual", "shared", "gated", "channels")


@cache
def adopted(name: str) -> Adopted:
    return adopt(ZOO[name](), 3)


def own(name: str) -> OwnNetwork:
    return OwnNetwork(name, adopted(name).layers, adopted(name).together)


def a_question(seed: int) -> Question:
    rng = np.random.default_rng(seed)
    asked = small_question(seed)
    facts = small_machine(int(rng.integers(1, 5)), int(2 ** rng.uniform(17.5, 21)))
    options = own(NAMES[seed % len(NAMES)])
    return replace(asked, options=options, epsilon_px=0, halo="exact", machine=facts)


@cache
def every_plan(seed: int) -> tuple[Search, list[Plan | None]]:
    """Of all layouts; None: it does not fit."""
    search = Search(a_question(seed))
    return search, [search.plan(layout) for layout in search.layouts()]


def legal(layers: tuple[Layer, ...], balance: tuple[int, ...], network: OwnNetwork) -> bool:
    cuts = set(accumulate(balance[:-1]))
    return not any(first < cut <= last for first, last in network.together.values() for cut in cuts)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_are_those_of_all_layouts(seed: int) -> None:
    search, plans = every_plan(seed)
    wanted = sorted(plan.step_s for plan in plans if plan is not None)
    found = search.best(3)
    assert [plan.step_s for plan in found] == wanted[:3]
    for plan in found:
        network = own(NAMES[seed % len(NAMES)])
        assert legal(network.layers, plan.balance, network)
        kind = search.question.precision, plan.stacked
        costs = layer_bytes(network.layers, *plan.tile_read_px, *kind)
        layout = plan.layout
        many = layout.micro_batches
        kinds = layout.checkpointing, search.question.optimizer
        wanted_bytes = partition_bytes(costs, plan.balance, many, *kinds)
        assert plan.device_bytes == max(part.total for part in wanted_bytes)


def test_memory_decides_in_some_of_these_questions() -> None:
    fitting = []
    for seed in SEEDS:
        _, plans = every_plan(seed)
        fitting.append(sum(plan is not None for plan in plans) / len(plans))
    assert sum(0 < share < 1 for share in fitting) > 3


def shared_question(**changes: object) -> Question:
    facts = small_machine(4, 2**24)
    return Question(own("shared"), 0, (96, 90), facts, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("swap", ["off", "all"])
def test_layers_that_share_a_weight_stay_together(
    swap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilenet.planning.estimate.MIN_BYTES", 0)
    network = own("shared")
    assert network.together
    search = Search(shared_question(partitions=2, swap=swap, micro_batches=2, batch_size=4))
    layouts = list(search.layouts())
    balances = [balance for one in layouts for balance in search._balances(one)]
    assert balances
    assert all(legal(network.layers, balance, network) for balance in balances)
    assert search.best(1)
    if swap == "off":
        plan = search.best(1)[0]
        every = [
            b for b in every_balance(len(network.layers), 2) if legal(network.layers, b, network)
        ]
        fastest = min(search.estimator.step_s(plan.layout, one)[0] for one in every)
        assert fastest <= plan.step_s <= 1.1 * fastest


def test_what_parts_them_is_refused() -> None:
    _, last = next(iter(own("shared").together.values()))
    count = len(own("shared").layers)
    with pytest.raises(TilenetError, match="share a weight stay in one partition"):
        Search(shared_question(balance=(last, count - last)))
    most = len([c for c in range(1, count) if legal((), (c, count - c), own("shared"))]) + 1
    machine = small_machine(most + 1, 2**24)
    with pytest.raises(TilenetError, match=f"ask for at most {most} partitions"):
        Search(replace(shared_question(partitions=most + 1), machine=machine))
    search = Search(replace(shared_question(), machine=machine))
    assert max(layout.partitions for layout in search.layouts()) <= most


def a_plan(name: str = "residual", **changes: object) -> Plan:
    facts = small_machine(4, 2**26)
    return Search(Question(own(name), 0, (96, 90), facts, **changes)).best(1)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ZOO)
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    free = {} if name in NAMES else {"partitions": 1, "micro_batches": 1}
    plan = a_plan(name, halo_mode="exchange", **free)
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    planned = read_plan(path)
    assert planned.question.options == own(name)
    assert planned.keys == plan.run_keys()
    found = Search(replan(path, 1)).best(1)[0]
    assert found.run_keys() == plan.run_keys()
    assert found.device_bytes == plan.device_bytes


@pytest.mark.parametrize(
    "change",
    [
        {"layers": []},
        {"layers": [{"kind": "conv"}]},
        {"layers": None},
        {"together": {"w": [3, 999]}},
        {"together": {"w": [3]}},
        {"together": []},
    ],
    ids=str,
)
def test_what_is_no_network_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "plan.json"
    entry = a_plan().to_json()
    entry["asked"]["options"] |= change
    path.write_text(json.dumps(entry))
    with pytest.raises(TilenetError, match=r"must be a plan .asked has no network"):
        read_plan(path)


def test_the_papers_numbers_are_left_out() -> None:
    plans = answer(Question(own("gated"), 0, (96, 90), small_machine(1, 2**26), grid=(3, 3)))
    said = explain(plans)
    assert "96 × 90 × 3 px" in said
    assert "9 tiles per rank, 9 in a micro-batch for global average, 1 micro-batch at once" in said
    with pytest.raises(TilenetError, match="the network is a module"):
        a_plan(halo="epsilon")


# --- the run


def architecture(name: str) -> Architecture:
    return Architecture(adopted(name).layers, adopted=adopted(name))


def unet(**changes: object) -> Architecture:
    options = UNetOptions(poolings=1, convolutions=1, base=4, bands=3, classes=3, **changes)  # type: ignore[arg-type]
    return Architecture(unet_layers(options), 3, options)


REQUIRED = ["--images", "a.tif", "--labels", "b.tif", "--classes", "3", "--output", "c"]


def test_a_run_takes_what_was_planned(tmp_path: Path) -> None:
    plan = a_plan(grid=(3, 2), partitions=2, micro_batches=2, nodes=1, batch_size=1)
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    more = ["--network.module", "zoo:Residual", "--steps", "1", "--plan", str(path)]
    run, _ = read_run_file([*REQUIRED, *more])
    shapes = (((1, 2, 3), (96, 90)),)
    found = plan_run(run, shapes, plan.num_ranks, architecture("residual"))
    assert found.balance == plan.balance
    assert found.micro_batches == plan.layout.micro_batches
    assert found.tiling(96, 90).grid == (3, 2)
    assert found.rule.halo_px == plan.halo_px
    for other, words in (
        ("shared", r"\(layers in .*\)"),
        ("other", r"\(layer 0 in .*\)"),
        ("unet", r"\(network in .*: a module, in the run: a U-Net of tilenet's own\)"),
    ):
        theirs = {"unet": unet(), "other": widened()}.get(other) or architecture(other)
        with pytest.raises(TilenetError, match=f"the network that is trained {words}"):
            plan_run(run, shapes, plan.num_ranks, theirs)
    with pytest.raises(TilenetError, match="a plan holds for images up to the size"):
        plan_run(run, (((1, 2, 3), (97, 90)),), plan.num_ranks, architecture("residual"))


def widened() -> Architecture:
    """The same network with a wider kernel in front."""
    first, *rest = adopted("residual").layers
    wider = replace(first, kernel=first.kernel + 2, padding=first.padding + 1)  # type: ignore[attr-defined, call-arg]
    return Architecture((wider, *rest), adopted=adopted("residual"))


def test_a_module_refuses_the_plan_of_a_unet(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    options = unet().options
    assert options is not None
    asked = Question(options, 3, (96, 90), small_machine(1, 2**26))
    write_plan(Search(asked).best(1)[0], path)
    more = ["--network.module", "zoo:Residual", "--steps", "1", "--plan", str(path)]
    run, _ = read_run_file([*REQUIRED, *more])
    with pytest.raises(TilenetError, match=r"a U-Net of tilenet's own, in the run: a module"):
        plan_run(run, (((1, 2, 3), (96, 90)),), 1, architecture("residual"))
