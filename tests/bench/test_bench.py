"""What is kept of benches, the page made of it, and the runner."""

import argparse
import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from bench import __main__ as runner
from bench import plots, render, report

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "bench" / "results"
NAMES = render.benches()


def test_the_page_is_what_the_results_say() -> None:
    page = (ROOT / "bench" / "README.md").read_text()
    assert page == render.rendered(), "run python -m bench --page"
    claims = [one for path in RESULTS.iterdir() for one in json.loads(path.read_text())["claims"]]
    assert all(f"| {claim['claim']} |" in page for claim in claims)
    broken = sum(not claim["holds"] for claim in claims)
    assert len(re.findall(r"\*\*no\*\* \|$", page, re.MULTILINE)) == broken


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


def test_commands_that_pages_name_are_benches() -> None:
    pages = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").glob("*.md")]
    named = {
        one for page in pages for one in re.findall(r"python -m bench (\w+)", page.read_text())
    }
    assert len(named) > 10
    assert named <= set(NAMES)


def test_less_than_what_is_kept_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    claims = [report.at_most("a", 1, 2), report.at_least("b", 1, 2)]
    assert [claim.holds for claim in claims] == [True, False]
    render.keep(report.entry("balance", ({}, claims)))
    with pytest.raises(RuntimeError, match=r"claims less than the result that is kept \(1, 2\)"):
        render.keep(report.entry("balance", ({}, claims[1:])))
    render.keep(report.entry("balance", ({}, [])))  # could not measure here
    assert len(json.loads((tmp_path / "balance.json").read_text())["claims"]) == 2
    render.keep(report.entry("gpu", ({"device": "NVIDIA H100 80GB HBM3"}, claims)))
    assert "gpu.py)**" in (page := render.rendered())
    assert "NVIDIA H100 80GB HBM3, " in page
    assert "[JSON](results/nvidia-h100-80gb-hbm3.json) | 1 of 2 |" in page


def test_options_are_the_arguments_of_a_bench() -> None:
    def bench(quick: bool, kills: int = 7, only: tuple[str, ...] = (), every: bool = False) -> None:
        """Not run."""

    module = SimpleNamespace(__doc__="What it measures.")
    parser: argparse.ArgumentParser = runner.options_of(bench, module, "x")  # type: ignore[arg-type]
    given = vars(parser.parse_args(["--quick", "--kills", "3", "--only", "a", "b"]))
    wanted = {"quick": True, "kills": 3, "only": ["a", "b"], "every": False, "output": None}
    assert given == wanted


@pytest.mark.parametrize("arguments", [["nope"], ["balance", "summit", "--quick"]])
def test_what_cannot_be_run_is_said(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    assert runner.main(arguments) == 2
    assert "benches: balance, " in capsys.readouterr().err


def test_the_picture_is_small_and_of_the_kept_result() -> None:
    assert plots.PICTURE.stat().st_size <= 100_000
    source = hashlib.sha256(plots.RESULT.read_bytes()).hexdigest()
    with Image.open(plots.PICTURE) as picture:
        assert picture.info["Source"] == source, "run python -m bench.plots"
    assert len(plots.figure_of(json.loads(plots.RESULT.read_text())).axes) == 2
