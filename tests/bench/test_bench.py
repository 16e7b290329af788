"""bench/README.md is what bench/render.py makes of the results that are kept."""

import json
import re
from pathlib import Path

import pytest

from bench import render, report

ROOT = Path(__file__).resolve().parent.parent.parent

RESULTS = ROOT / "bench" / "results"
NAMES = render.benches()


def test_the_page_is_what_the_results_say() -> None:
    page = (ROOT / "bench" / "README.md").read_text()
    assert page == render.rendered(), "run python -m bench.render"


def test_every_bench_has_a_result_or_says_why_not() -> None:
    found = {json.loads(path.read_text())["bench"] for path in RESULTS.iterdir()}
    assert len(NAMES) > 10
    assert sorted(found | set(render.WITHOUT)) == NAMES


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.iterdir()))
def test_a_result_names_its_bench_its_machine_and_what_it_claims(name: str) -> None:
    text = (RESULTS / f"{name}.json").read_text()
    result = json.loads(text)
    assert text.count("\n") == 1
    if result["bench"] in render.BY_DEVICE:
        assert name == report.device_stem(result["figures"]["device"])
    else:
        assert name == result["bench"]
    assert result["machine"]
    assert set(result["versions"]) >= {"python", "torch", "mpi4py"}
    assert result["claims"]
    for claim in result["claims"]:
        # at most or at least the goal, whichever the bench meant; equal to it is both
        assert claim["holds"] or claim["value"] != claim["goal"]


def test_no_claim_is_left_out_of_the_page() -> None:
    page = (ROOT / "bench" / "README.md").read_text()
    broken = 0
    for path in RESULTS.iterdir():
        for claim in json.loads(path.read_text())["claims"]:
            assert f"| {claim['claim']} |" in page
            broken += not claim["holds"]
    assert len(re.findall(r"\*\*no\*\* \|$", page, re.MULTILINE)) == broken
