"""bench/plots.py draws the kept results, and the picture of docs/speed.md is up to date."""

import hashlib
import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from PIL import Image

from bench import plots


def result(name: str) -> dict[str, Any]:
    """The one that is kept."""
    kept: dict[str, Any] = json.loads(plots.result_text(name))
    return kept


@pytest.mark.parametrize("name", sorted(plots.PLOTS))
def test_a_plot_is_the_same_bytes_whatever_the_settings(name: str, tmp_path: Path) -> None:
    plots.write(name, tmp_path / "one.png")
    with matplotlib.rc_context({"axes.labelsize": 20, "axes.facecolor": "black", "font.size": 20}):
        plots.write(name, tmp_path / "two.png")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


@pytest.mark.parametrize("name", sorted(plots.PLOTS))
def test_axes_have_titles_and_units(name: str) -> None:
    for axes in plots.figure_of(name, result(name)).axes:
        assert axes.get_title(loc="left")
        assert axes.get_ylabel()


@pytest.mark.parametrize(("panel", "key"), [(0, "seconds"), (1, "efficiency")])
def test_lines_of_scaling_are_seconds_and_efficiency_by_ranks(panel: int, key: str) -> None:
    runs = result("scaling")["figures"]["runs"]
    axes = plots.figure_of("scaling", result("scaling")).axes[panel]
    drawn = {line.get_label(): [(x, y) for x, y in line.get_xydata()] for line in axes.lines}
    for kind, way in {(run["kind"], run["scaling"]) for run in runs}:
        some = [run for run in runs if (run["kind"], run["scaling"]) == (kind, way)]
        assert drawn[f"{kind}, {way}"] == [(run["ranks"], run[key]) for run in some]


def test_the_picture_is_small_and_of_the_kept_result() -> None:
    assert plots.PICTURE.stat().st_size <= 100_000
    source = hashlib.sha256(plots.result_text("scaling").encode()).hexdigest()
    with Image.open(plots.PICTURE) as picture:
        assert picture.info["Source"] == source, "run python -m bench.plots"
