"""The table of people's networks: what becomes of each, and what the page says of them."""

import time
from contextlib import suppress
from typing import Any

import pytest
import torch

from bench import render, report
from bench.exactness import taken
from bench.exactness.libraries import Listed
from bench.exactness.networks import Choice

WRITTEN = [name for name in taken.table() if name.startswith("written/")]


def listed(maker: str, **options: Any) -> Listed:
    return Listed("test", maker, Choice(maker, options, 4))


def row(name: str, outcome: str, reason: str = "", attention: bool = False) -> dict[str, Any]:
    return {
        "library": "timm", "name": name, "attention": attention, "outcome": outcome,
        "reason": reason, "seconds": 1.0,
    }  # fmt: skip


ROWS = [
    row("a", "taken"), row("b", "refused", "split: unknown | at all"),
    row("c", "refused", "view: reshaped", attention=True), row("d", "failed", "it does not run"),
    row("e", "refused", "split: unknown | at all"),
]  # fmt: skip


def test_the_table_names_what_people_use() -> None:
    table = taken.table()
    assert len(table) >= taken.LEAST_NETWORKS
    assert set(taken.QUICK) <= set(table)
    attention = {name for name, one in table.items() if one.attention}
    assert {
        "segmentation_models_pytorch/MAnet/resnet34",
        "monai/UNETR",
        "written/DANet",
    } < attention
    assert {f"written/{name}" for name in taken.WRITTEN_ATTENTION} < attention
    assert "written/Attention U-Net" not in attention  # its gates look at their own cells


@pytest.mark.parametrize("name", WRITTEN)
def test_a_network_that_is_written_out_runs_at_its_images_size(name: str) -> None:
    out = taken.table()[name].choice.module().train()(torch.randn(2, 4, 64, 96))
    while not isinstance(out, torch.Tensor):
        out = out[0]
    assert out.shape[0] == 2
    assert out.shape[2:] == (64, 96)
    assert out.isfinite().all()


def test_each_outcome_is_told_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = "bench.exactness.written_heads"
    assert taken.outcome_of(listed(f"{heads}:STDC")) == ("taken", "")
    outcome, reason = taken.outcome_of(listed("torch.nn:Softmin", dim=2))
    assert outcome == "refused"
    assert "; " not in reason
    outcome, reason = taken.outcome_of(listed("torch.nn:Linear", in_features=3, out_features=2))
    assert (outcome, reason[:16]) == ("failed", "it does not run:")
    assert taken.outcome_of(listed("torch.nn:Nowhere"))[0] == "failed"

    def breaks(*_: object) -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr("tilenet.adoption.adopt.adopt", breaks)
    assert taken.outcome_of(listed(f"{heads}:STDC")) == ("failed", "KeyError: 'a mistake'")


def test_what_takes_too_long_ends_though_errors_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(_: Listed) -> tuple[str, str]:
        while True:
            with suppress(Exception):
                time.sleep(0)

    monkeypatch.setattr(taken, "outcome_of", endless)
    monkeypatch.setattr(taken, "LIMIT_S", 0.2)
    (only,) = taken.adopt_each(["written/STDC"])
    assert (only["outcome"], only["reason"]) == (
        "failed",
        "adopting it takes more than 0.2 CPU seconds",
    )


@pytest.mark.parametrize(
    ("sentence", "reason"),
    [
        (
            "each layer's neighbourhood must be known, and nobody knows it (a.b: conv2d [3, 1]); "
            "use a network without it",
            "conv2d: nobody knows it",
        ),
        (
            "each weight belongs to one layer (a; b); use another",
            "each weight belongs to one layer (a; b)",
        ),
        ("no remedy", "no remedy"),
    ],
)
def test_a_reason_is_the_operator_and_the_clause(sentence: str, reason: str) -> None:
    assert taken.short_reason(sentence) == reason


def test_claims_count_networks_with_attention_apart() -> None:
    some, apart, every, failed = taken.claims(ROWS)
    assert (some.value, apart.value, every.value, failed.value) == (5, 0.25, 0.2, 1)
    assert not any(one.holds for one in (some, apart, every, failed))
    assert failed.claim == "networks that failed (timm/d)"


def test_the_page_groups_what_is_not_taken_by_reason(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    figures = {"networks": ROWS, "tables": taken.tables(ROWS)}
    render.keep(report.entry("taken", (figures, taken.claims(ROWS))))
    page = render.rendered()
    assert "\n## Networks by library\n\n| library | networks |" in page
    assert "\n| timm | 5 | 1 | 3 | 1 | 4 | 25% |\n| all | 5 | 1 | 3 | 1 | 4 | 25% |\n" in page
    assert "\n| refused: split: unknown \\| at all | 2 | timm/b; timm/e |\n" in page
    assert "| timm/c (attention) |\n" in page
