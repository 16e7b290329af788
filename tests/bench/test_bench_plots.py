"""The plots of bench/README.md: what is drawn is what the results say, and files are up to date."""

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.container import BarContainer

from bench import plots, render

ROOT = Path(__file__).resolve().parent.parent.parent

KEPT = sorted(path.stem for path in (ROOT / "bench" / "plots").iterdir())
NUMBER = re.compile(r"-?\d+\.\d+")
DERIVED = re.compile(r"\b[mp][0-9a-f]{10}\b")  # names made from the numbers
PINNED = f"matplotlib=={version('matplotlib')}" in (ROOT / "constraints.txt").read_text().split()


def result(name: str) -> dict[str, Any]:
    """The one that is kept."""
    path = ROOT / "bench" / "results" / f"{name}.json"
    kept: dict[str, Any] = json.loads(path.read_text())
    return kept


def lines(name: str, panel: int = 0) -> dict[str, list[tuple[float, float]]]:
    """Points of a plot's lines, by label."""
    axes = plots.figure_of(name, result(name)).axes[panel]
    return {str(line.get_label()): [(x, y) for x, y in line.get_xydata()] for line in axes.lines}


def bars(name: str) -> dict[str, list[tuple[float, float]]]:
    """Widths and heights of a plot's bars, by label."""
    (axes,) = plots.figure_of(name, result(name)).axes
    return {
        str(one.get_label()): [(bar.get_width(), bar.get_height()) for bar in one]
        for one in axes.containers
        if isinstance(one, BarContainer)
    }


def test_every_plot_is_of_a_bench_and_every_result_with_one_is_drawn() -> None:
    assert set(plots.PLOTS) <= set(render.benches())
    with_result = {path.stem for path in (ROOT / "bench" / "results").iterdir()}
    assert sorted(with_result & set(plots.PLOTS)) == KEPT, "run python -m bench.render"


# Other machines round the last digit otherwise, and other versions draw otherwise: so numbers are
# compared to a hundredth of a point, of the pinned version.
@pytest.mark.skipif(not PINNED, reason="drawn with the matplotlib of constraints.txt")
@pytest.mark.parametrize("name", KEPT)
def test_the_file_is_what_is_drawn_now(name: str) -> None:
    kept = DERIVED.sub("", (ROOT / "bench" / "plots" / f"{name}.svg").read_text())
    drawn = DERIVED.sub("", plots.drawn(name, result(name)))
    assert NUMBER.split(kept) == NUMBER.split(drawn), "run python -m bench.render"
    pairs = zip(NUMBER.findall(kept), NUMBER.findall(drawn), strict=True)
    assert max(abs(float(old) - float(new)) for old, new in pairs) < 0.01


@pytest.mark.parametrize("name", sorted(plots.PLOTS))
def test_a_plot_is_the_same_bytes_whatever_the_settings(name: str) -> None:
    first = plots.drawn(name, result(name))
    with matplotlib.rc_context({"axes.labelsize": 20, "axes.facecolor": "black", "font.size": 20}):
        assert plots.drawn(name, result(name)) == first
    assert "<dc:date>" not in first
    assert "<text " in first


@pytest.mark.parametrize("name", sorted(plots.PLOTS))
def test_a_plot_says_what_it_shows(name: str) -> None:
    figure = plots.figure_of(name, result(name))
    assert plots.said(name).endswith(".")
    units = "seconds|MiB|%|ranks|GPUs|devices|kills|pixels|partitions|parameters|over|of one|step"
    for axes in figure.axes:
        assert axes.get_title(loc="left")
        labels = [axes.get_xlabel(), axes.get_ylabel()]
        assert re.search(units, " ".join(labels)), labels
    ElementTree.fromstring(plots.drawn(name, result(name)))


def test_points_of_the_model_are_predicted_over_measured_seconds() -> None:
    points, drawn = result("model")["figures"]["points"], lines("model")
    for count, mode in {(point["ranks"], point["halo_mode"]) for point in points}:
        some = [one for one in points if (one["ranks"], one["halo_mode"]) == (count, mode)]
        name = "1 rank" if count == 1 else f"{count} ranks, {mode}"
        assert drawn[name] == [(one["measured_s"], one["step_s"]) for one in some]
    assert all(x == y for x, y in drawn["equal"])


@pytest.mark.parametrize(("panel", "key"), [(0, "seconds"), (1, "efficiency")])
def test_lines_of_scaling_are_seconds_and_efficiency_by_ranks(panel: int, key: str) -> None:
    runs, drawn = result("scaling")["figures"]["runs"], lines("scaling", panel)
    for kind, way in {(run["kind"], run["scaling"]) for run in runs}:
        some = [run for run in runs if (run["kind"], run["scaling"]) == (kind, way)]
        assert drawn[f"{kind}, {way}"] == [(run["ranks"], run[key]) for run in some]


def test_bars_of_sums_are_seconds_without_those_of_backward() -> None:
    drawn = bars("reduction")
    rows = [row["seconds"] for row in result("reduction")["figures"]["alone"]]
    for way in ("ours", "ddp"):
        wanted = [row[way] - row["none"] for row in rows]
        assert [tall for _, tall in drawn[way]] == pytest.approx(wanted)


def test_bars_of_commands_and_jobs_are_their_seconds() -> None:
    figures, drawn = result("end_to_end")["figures"], bars("end_to_end")
    commands = figures["commands"][::-1]
    assert [wide for wide, _ in drawn["tilenet"]] == [one["seconds"] for one in commands]
    for whose, floor in figures["floor"].items():
        names = [name for one in commands if (name := f"{one['command']}_s") in floor]
        assert [wide for wide, _ in drawn[whose]] == [floor[name] for name in names] != []
    rows, drawn = result("survival")["figures"]["rows"], bars("survival")
    for how, label in (
        ("by itself", "to its first new step, by itself"),
        ("submitted", "to its end; to be submitted again"),
    ):
        wanted = sorted((row["seconds"] for row in rows if row["resumes"] == how), reverse=True)
        assert [wide for wide, _ in drawn[label] if wide] == wanted != []
