"""Draw what benches found, as PNG: a picture of each bench named below, and that of docs/speed.md.

    python -m bench.plots

Pictures go to bench/out/NAME.png, which git ignores; docs/speed.png is that of `scaling`.
A plot is a function with its bench's name.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.report import ROOT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PICTURE", "PLOTS", "figure_of", "result_text", "write"]

Result = dict[str, Any]
OUT, PICTURE = ROOT / "bench" / "out", ROOT / "docs" / "speed.png"
# By M. Okabe and K. Ito: told apart with any colour vision
BLUE, ORANGE, GREEN, RED = "#0072b2", "#e69f00", "#009e73", "#d55e00"
GREY, PALE = "#666666", "#e8e8e8"
WIDTH = 6.6  # inches of 100 pixels
STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "lines.markersize": 4.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
}


def result_text(name: str) -> str:
    """The kept result of a bench, a line of JSON."""
    return (ROOT / "bench" / "results" / f"{name}.json").read_text()


def figure_of(name: str, result: Result) -> "Figure":
    """A bench's plot, in which nothing of a user's own settings counts."""
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", STYLE]):
        figure = Figure(figsize=(WIDTH, 3.2), dpi=100, layout="constrained")
        PLOTS[name](figure, result)
    return figure


def write(name: str, path: Path) -> None:
    """Draw the kept result of a bench; the file names that result by its SHA-256."""
    from matplotlib import style

    text = result_text(name)
    path.parent.mkdir(exist_ok=True)
    source = {"Source": hashlib.sha256(text.encode()).hexdigest(), "Software": None}
    with style.context(["default", STYLE]):
        figure_of(name, json.loads(text)).savefig(path, metadata=source)


def summit(figure: "Figure", result: Result) -> None:
    """Predicted scaling on Summit against linear, and how far 100 images a step scale beyond."""
    figure.set_size_inches(WIDTH, 3.7)
    left, right = figure.subplots(1, 2)
    figures = result["figures"]
    rows = figures["strong scaling with that factor"]
    gpus = [row["GPUs"] for row in rows]
    alone = gpus[0] * rows[0]["epoch_s"]
    left.plot(gpus, [alone / one for one in gpus], "--", color=GREY, label="linear")
    left.plot(gpus, [row["epoch_s"] for row in rows], "o-", color=BLUE, label="predicted")
    for run, marker in zip(figures["the paper's runs"], ("s", "*"), strict=True):
        gpu_count = re.findall(r"(\d+) GPUs", run["run"])
        label = f"measured: {run['run'].split(',')[0]}"
        left.plot(
            int(gpu_count[0]), run["measured_s"], marker, color=RED, markersize=8, label=label
        )
    _logarithmic(left, [6, 24, 96, 384, 1536], [10, 100, 1000])
    _labelled(left, "An epoch of the paper's run", "GPUs", "seconds", legend=2)
    title = "how far 100 images a step scale: "
    for key, colour in ((f"{title}Summit, float32", BLUE), (f"{title}H200, bfloat16", ORANGE)):
        devices = [row["devices"] for row in figures[key]]
        for way, line in (("exchange", "o-"), ("overlap", "s:")):
            shares = [100 * row[f"{way}, efficiency"] for row in figures[key]]
            says = f"{key.removeprefix(title).split(',')[0]}, {way}"
            right.plot(devices, shares, line, color=colour, label=says)
    right.axhline(100, ls="--", color=GREY)
    right.set_xscale("log")
    right.set_xticks([10**n for n in (2, 3, 4, 5)], ["100", "1 000", "10 000", "100 000"])
    right.set_ylim(0, 105)
    title = "100 images of 10 000² a step"
    _labelled(right, title, "devices", "predicted efficiency, %", legend=2)


def exchange(figure: "Figure", result: Result) -> None:
    """Halos exchanged against overlapping tiles: computed pixels, and seconds of a step."""
    left, right = figure.subplots(1, 2)
    ways = ("overlap", "exchange", "no communication")
    rows = [row for row in result["figures"]["work"] if row["size"] == 10_000]
    bars = {way: [row[way] for row in rows] for way in ways[:2]}
    presets = [row["preset"].replace("-", "\n") for row in rows]
    _grouped(left, presets, bars, (ORANGE, BLUE))
    left.axhline(1, ls="--", color=GREY)
    _labelled(left, "Work of 16 ranks on 10 000²", "", "computed, over the image")
    rows = [row for row in result["figures"]["step"] if row["norm"] == "none"]
    ranks = sorted({row["ranks"] for row in rows})
    found = {(row["way"], row["ranks"]): row["seconds"] for row in rows}
    bars = {way: [found[way, count] for count in ranks] for way in ways}
    _grouped(right, [str(count) for count in ranks], bars, (ORANGE, BLUE, GREY))
    side = result["figures"]["side_px"]
    title = f"A step on {side}², {_cores(result)} cores"
    _labelled(right, title, "ranks", "seconds")


def scaling(figure: "Figure", result: Result) -> None:
    """Weak and strong scaling of training on one machine: seconds of a step, and efficiency."""
    panels = figure.subplots(1, 2)
    runs = result["figures"]["runs"]
    ranks, cores = sorted({run["ranks"] for run in runs}), _cores(result)
    for key, axes in zip(("seconds", "efficiency"), panels, strict=True):
        for kind, colour, marker in zip(
            ("images", "overlap", "exchange"), (GREEN, ORANGE, BLUE), "osD", strict=False
        ):
            for way, line in (("weak", "-"), ("strong", ":")):
                some = [run for run in runs if (run["kind"], run["scaling"]) == (kind, way)]
                counts, values = [run["ranks"] for run in some], [run[key] for run in some]
                says = f"{kind}, {way}" if some else None
                axes.plot(counts, values, marker + line, color=colour, label=says)
        if ranks[-1] > cores:
            axes.axvspan(cores, ranks[-1], color=PALE, label="more ranks than cores")
        axes.set_xscale("log")
        axes.set_xticks(ranks, [str(count) for count in ranks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
    panels[1].axhline(1, ls="--", color=GREY)
    _labelled(panels[0], "Seconds of a training step", "ranks", "seconds", legend=0)
    _labelled(panels[1], "Efficiency", "ranks", "of one rank's", legend=0)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, handlelength=1.6)


def lms(figure: "Figure", result: Result) -> None:
    """The largest image under a device limit, by what is done where memory does not suffice."""
    axes = figure.subplots()
    networks = result["figures"]["networks"]
    ways = ("checkpointing", "swap", "auto")
    bars = {way: [one["pixels_over_off"][way] for one in networks.values()] for way in ways}
    _grouped(axes, list(networks), bars, (ORANGE, BLUE, GREEN))
    theirs = [(n, one["articles"]) for n, one in enumerate(networks.values()) if one["articles"]]
    axes.plot(*zip(*theirs, strict=True), "*", color=RED, markersize=9, label="IBM's articles")
    axes.axhline(1, ls="--", color=GREY)
    title = f"Largest image in {result['figures']['limit_mib']:.0f} MiB of device memory"
    _labelled(axes, title, "network", "pixels, over those with neither")


PLOTS: dict[str, Callable[["Figure", Result], None]] = {
    draw.__name__: draw for draw in (summit, exchange, scaling, lms)
}


def _labelled(axes: "Axes", title: str, x: str, y: str, *, legend: int = 1) -> None:
    """Title, axes and a legend: 0: none; 1: inside; else below, in so many columns."""
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if legend == 1:
        axes.legend()
    elif legend:
        axes.legend(
            loc="upper left", bbox_to_anchor=(-0.15, -0.2), ncols=legend,
            handlelength=1.6, columnspacing=1,
        )  # fmt: skip


def _grouped(
    axes: "Axes", names: Sequence[str], bars: dict[str, list[float]], colours: Sequence[str]
) -> None:
    """Groups of bars side by side, a group for each name."""
    wide = 0.8 / len(bars)
    for number, ((label, values), colour) in enumerate(zip(bars.items(), colours, strict=True)):
        shift = (number - (len(bars) - 1) / 2) * wide
        places = [place + shift for place in range(len(names))]
        axes.bar(places, values, wide, color=colour, label=label)
    axes.set_xticks(range(len(names)), names)
    axes.grid(visible=False, axis="x")


def _logarithmic(axes: "Axes", x: Sequence[float], y: Sequence[float]) -> None:
    """Both axes, with plain numbers at some places."""
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(x, [f"{one:g}" for one in x])
    axes.set_yticks(y, [f"{one:g}" for one in y])
    axes.minorticks_off()


def _cores(result: Result) -> int:
    """Of the machine that a bench ran on."""
    found = re.search(r"(\d+) cores", result["machine"])
    return int(found[1]) if found else 1


def main() -> None:
    """Draw them all."""
    for name in PLOTS:
        write(name, OUT / f"{name}.png")
    write("scaling", PICTURE)


if __name__ == "__main__":
    main()
