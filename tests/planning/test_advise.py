"""What is said where nothing fits: each remedy is tried here as its words say."""

import re
from dataclasses import replace
from typing import Any

import pytest
from questions import small_machine

from tilenet.geometry.unet import UNetOptions
from tilenet.planning.advise import CHOICES, why_nothing_fits
from tilenet.planning.fitting import find_first, find_fitting
from tilenet.planning.plan import Question
from tilenet.planning.search import Search

pytestmark = pytest.mark.usefixtures("fewer_layouts")
ASKED = Question(
    UNetOptions(poolings=2, convolutions=1, base=4), 5, (150, 100), small_machine(4, 2**20)
)
FREE = dict.fromkeys(CHOICES)
REMEDIES: dict[str, dict[str, Any]] = {
    "swap auto": {"swap": "auto"},
    "leave all choices to the planner": FREE,
    **{
        f"leave all choices to the planner, halo_mode {mode}": {**FREE, "halo_mode": mode}
        for mode in ("overlap", "exchange", "sweep")
    },
    "precision bfloat16": {"precision": "bfloat16"},
}
OVER_IMAGES = replace(ASKED.options, base=32, norm="instance")  # type: ignore[type-var]
OF_NORMS: dict[str, dict[str, Any]] = {
    "norm_scope tile (approximate)": {"options": replace(OVER_IMAGES, norm_scope="tile")},
}


def sentence(asked: Question) -> str:
    assert find_fitting(asked) == []
    said = why_nothing_fits(asked)
    assert "\n" not in said
    return said


def limited(asked: Question, gib: float) -> Question:
    return replace(asked, machine=replace(asked.machine, memory_bytes=int(gib * 2**30)))


@pytest.mark.parametrize(
    ("changes", "remedies"),
    [
        ({"grid": (1, 1), "partitions": 1}, {"swap auto", "leave all choices to the planner"}),
        ({"grid": (3, 2), "micro_batches": 3}, {"leave all choices to the planner"}),
        ({"halo_mode": "exchange"}, {"leave all choices to the planner, halo_mode overlap"}),
        ({"options": OVER_IMAGES}, {"leave all choices to the planner, halo_mode exchange"}),
        ({"grid": (4, 4), "options": OVER_IMAGES}, {"norm_scope tile (approximate)"}),
        ({"checkpointing": "never", "swap": "auto", "grid": (1, 1)}, {"precision bfloat16"}),
    ],
)
def test_every_remedy_named_fits_when_it_is_tried(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], remedies: set[str]
) -> None:
    monkeypatch.setattr("tilenet.planning.estimate.MIN_BYTES", 0)  # tensors here are small
    asked = replace(ASKED, **({"options": replace(ASKED.options, base=32)} | changes))
    tried = REMEDIES | (OF_NORMS if asked.options == OVER_IMAGES else {})
    leanest = Search(asked).leanest()
    assert leanest is not None
    plans = Search(asked).best(1)
    least = min([leanest.device_bytes, *(plan.device_bytes for plan in plans)])
    asked = limited(asked, 0.9 * least / (1 - asked.reserve) / 2**30)
    said = sentence(asked)
    named = {name for name in tried if f"; {name}: " in said or f"; or {name}: " in said}
    for name in named:
        plan = find_first(replace(asked, **tried[name]))
        assert plan is not None
        assert f"{name}: {plan.layout} take " in said
    assert named >= remedies
    for name in tried.keys() - named:
        question = replace(asked, **tried[name])
        plan = find_first(question)
        assert plan is None or str(plan.layout) in said  # another remedy says the same


def test_a_larger_device_is_the_last_resort_and_its_size_does() -> None:
    asked = limited(replace(ASKED, optimizer="sgd", precision="bfloat16"), 1e-5)
    # Large enough for a tenth of a GiB, to which sizes are rounded, to matter.
    big = replace(asked.options, base=800, poolings=3, convolutions=1)
    asked = replace(asked, options=big, image=(500, 500))
    said = sentence(asked)
    found = re.search(r"\); take devices of at least ([\d.]+) GiB$", said)
    assert found
    gib = float(found[1])
    leanest = Search(asked).leanest()
    assert leanest is not None
    assert f"(needed: {leanest.device_bytes / 2**30:.1f} GiB at least" in said
    assert gib > 1
    assert Search(limited(asked, gib)).best(1)
    assert leanest.device_bytes > limited(asked, gib - 0.15).limit_bytes
