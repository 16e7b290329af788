"""Benches run in their smallest case, so that none rots, and say what they always said."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("segmentation_models_pytorch", "timm", "torchvision")
# Of 20 seconds at most. What they time is no test's affair, what they compute is.
TIMED = ("balance", "pipeline", "survey")
EXACT = ("halo_modes", "mapping")


def result_of(bench: str, *options: str) -> dict[str, Any]:
    """The last line of a bench."""
    command = [sys.executable, "-m", "bench", bench, "--quick", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", [*TIMED, *EXACT])
def test_a_bench_runs_and_claims(name: str) -> None:
    found = result_of(name)
    assert found["bench"] == name
    assert found["figures"]
    assert found["claims"]
    if name in EXACT:
        assert [claim for claim in found["claims"] if not claim["holds"]] == []


def test_the_papers_tables_are_those_of_the_kept_result() -> None:
    kept = json.loads((ROOT / "bench" / "results" / "summit.json").read_text())
    found = result_of("summit")
    for claim, before in zip(found["claims"], kept["claims"], strict=True):
        assert claim["claim"] == before["claim"]
        assert claim["value"] == pytest.approx(before["value"], rel=1e-9)


@pytest.mark.skipif(
    not all(map(find_spec, PACKAGES)), reason=f"needs pip install '.[bench]': {PACKAGES}"
)
def test_other_peoples_networks_over_ranks_are_their_modules() -> None:
    found = result_of("networks", "--only", "lraspp_mobilenet_v3_large")
    off = [claim for claim in found["claims"] if " off the module's" in claim["claim"]]
    assert len(off) == 4  # logits and gradients, with batch norm frozen and of a step
    assert [claim["claim"] for claim in off if not claim["holds"]] == []
