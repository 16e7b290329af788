"""Pictures: what is drawn, what is written, and what is said where that cannot be."""

import random
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tilenet.errors import TilenetError
from tilenet.planning.time.timeline import Timeline, simulate
from tilenet.report.charts import thinned
from tilenet.report.plan_charts import GIB, plot_level_bytes, plot_timeline


@pytest.fixture
def timeline() -> Timeline:
    rng = random.Random(5)
    costs = [[rng.uniform(0.01, 0.03) for _ in range(4)] for _ in range(2)]
    return simulate(*costs, [0.002] * 3, 3, "except_last")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def saved(figure: Figure, *arguments: object, **options: object) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", saved)
    return figures


def bars(axes: Axes) -> list[tuple[float, float, float, float]]:
    """Left, bottom, width and height of the bars."""
    return [bar.get_bbox().bounds for bar in axes.patches]  # type: ignore[attr-defined]


def test_a_timeline_has_a_bar_for_each_event(
    tmp_path: Path, timeline: Timeline, drawn: list[Figure]
) -> None:
    plot_timeline(timeline, tmp_path / "timeline.png", "four by three")
    (axes,) = drawn[0].axes
    shown = sorted((round(y + 0.4), x, x + width) for x, y, width, _ in bars(axes))
    wanted = sorted((e.partition, e.start_s * 1e3, e.stop_s * 1e3) for e in timeline.events)
    assert np.allclose(shown, wanted)
    assert axes.get_xlabel().startswith("time [ms]")
    assert f"idle: {timeline.bubble:.0%}" in axes.get_xlabel()
    assert axes.get_title(loc="left") == "four by three"
    colours: dict[str, set[object]] = {kind: set() for kind in "FRB"}
    for event, bar in zip(timeline.events, axes.patches, strict=True):
        if event.kind in colours:
            colours[event.kind].add(bar.get_facecolor())
    assert [len(found) for found in colours.values()] == [1, 1, 1]
    assert len(set.union(*colours.values())) == 3
    (legend,) = drawn[0].legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["forward", "recomputation", "backward"]


def test_levels_are_stacked_and_then_in_network_order(tmp_path: Path, drawn: list[Figure]) -> None:
    rng = random.Random(9)
    encoder = [rng.uniform(1, 9) * GIB for _ in range(5)]
    decoder = [rng.uniform(1, 9) * GIB for _ in range(4)]
    plot_level_bytes(encoder, decoder, tmp_path / "levels.png")
    left, right = drawn[0].axes
    down, up = [x / GIB for x in encoder], [x / GIB for x in decoder]
    stacked = [(0.0, height) for height in down] + list(zip(down, up, strict=False))
    assert np.allclose([(y, height) for _, y, _, height in bars(left)], stacked)
    assert np.allclose([height for *_, height in bars(right)], down + up[::-1])
    names = [text.get_text() for text in right.get_xticklabels()]
    assert names == ["E0", "E1", "E2", "E3", "E4", "D3", "D2", "D1", "D0"]
    assert "GiB" in left.get_ylabel()


def test_pictures_are_written_whole_over_old_ones(tmp_path: Path, timeline: Timeline) -> None:
    path = tmp_path / "picture.png"
    path.write_text("old")
    plot_timeline(timeline, path)
    first = matplotlib.image.imread(path)
    assert first.ndim == 3
    assert len(np.unique(first.reshape(-1, first.shape[-1]), axis=0)) > 5
    plot_level_bytes([3.0 * GIB, 2.0 * GIB], [1.0 * GIB], tmp_path / "levels.svg")
    assert "<svg" in (tmp_path / "levels.svg").read_text()
    plot_timeline(timeline, tmp_path / "without_ending")
    assert (tmp_path / "without_ending").read_bytes().startswith(b"\x89PNG")
    names = ["levels.svg", "picture.png", "without_ending"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names


@pytest.mark.parametrize("name", ["missing/picture.png", "picture.doc"])
def test_what_cannot_be_written_is_refused_and_leaves_nothing(
    tmp_path: Path, timeline: Timeline, name: str
) -> None:
    with pytest.raises(TilenetError, match="choose another path"):
        plot_timeline(timeline, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_matplotlib_is_loaded_only_to_draw() -> None:
    loaded = "print(*(name in sys.modules for name in ('matplotlib', 'torch')))"
    code = f"import sys, tilenet.report.plan_charts; {loaded}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(("count", "most"), [(1, 10), (20, 10), (21, 10), (997, 50), (5000, 480)])
def test_thinned_curves_keep_the_ends_of_each_column(count: int, most: int) -> None:
    rng = np.random.default_rng(count)
    x, y = np.arange(count) + 3.0, rng.normal(size=count)
    steps, values = thinned(x, y, most)
    every = 1 if count <= 2 * most else -(-count // most)
    groups = [y[begin : begin + every] for begin in range(0, count, every)]
    wanted = y if every == 1 else [end for group in groups for end in (group.min(), group.max())]
    assert np.array_equal(values, wanted)
    assert np.array_equal(np.unique(steps), x[::every])
    assert len(steps) == len(values) <= 2 * most
