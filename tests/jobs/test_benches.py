"""Benches that no other test runs still run, and say what they always said."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("segmentation_models_pytorch", "timm", "torchvision")


def result_of(bench: str, *options: str) -> dict[str, Any]:
    """The last line of a bench."""
    command = [sys.executable, "-m", f"bench.{bench}", "--quick", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_the_papers_tables_are_those_of_the_kept_result() -> None:
    kept = json.loads((ROOT / "bench" / "results" / "summit.json").read_text())
    found = result_of("scale.summit")
    for claim, before in zip(found["claims"], kept["claims"], strict=True):
        assert claim["claim"] == before["claim"]
        assert claim["value"] == pytest.approx(before["value"], rel=1e-9)


@pytest.mark.skipif(
    not all(map(find_spec, PACKAGES)), reason=f"needs pip install '.[bench]': {PACKAGES}"
)
def test_other_peoples_networks_over_ranks_are_their_modules() -> None:
    found = result_of("exactness.networks", "--only", "lraspp_mobilenet_v3_large")
    off = [claim for claim in found["claims"] if " off the module's" in claim["claim"]]
    assert len(off) == 4  # logits and gradients, with batch norm frozen and of a step
    assert [claim["claim"] for claim in off if not claim["holds"]] == []
