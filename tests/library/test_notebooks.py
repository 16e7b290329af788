"""The notebooks of examples/ run from their first cell to their last, and learn something."""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("name", ["first-map", "own-loop"])
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "examples")
    mpl.use("Agg")
    cells = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "notebooks are kept without what they print"
            exec("".join(cell["source"]), names)
    assert names["losses"][-1] < names["losses"][0]
