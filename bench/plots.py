"""Draw what benches found: one small SVG each, written by bench/render.py to bench/plots/NAME.svg.

A plot is a function with its bench's name; the first line of its docstring is the text beside it.
Text stays text, and nothing in the file depends on the day or the user's settings: the same results
give the same bytes with the same matplotlib.
"""

import re
from collections import Counter
from collections.abc import Callable
from io import StringIO
from typing import TYPE_CHECKING, Any

from bench.plot_style import (
    BLUE,
    GREEN,
    GREY,
    MARKERS,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    WIDTH,
    grouped,
    labelled,
    logarithmic,
    settings,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PLOTS", "drawn", "figure_of", "said"]

Result = dict[str, Any]
MIB = 2**20


def drawn(name: str, result: Result) -> str:
    """The text of a bench's SVG."""
    text = StringIO()
    with settings():
        figure_of(name, result).savefig(
            text, format="svg", metadata={"Date": None, "Creator": None}
        )
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def figure_of(name: str, result: Result) -> "Figure":
    """A bench's plot as matplotlib has it."""
    from matplotlib.figure import Figure

    with settings():
        figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
        PLOTS[name](figure, result)
    return figure


def said(name: str) -> str:
    """What a plot shows, in a sentence."""
    return (PLOTS[name].__doc__ or "").splitlines()[0]


def exactness(figure: "Figure", result: Result) -> None:
    """Trained weights against those of a plain loop over the whole image, for all tilings."""
    axes = figure.subplots()
    rows = result["figures"]["rows"]
    ranks = sorted({row["ranks"] for row in rows})
    networks = list(dict.fromkeys(row["network"] for row in rows))
    for network, colour, marker in zip(
        networks, (BLUE, ORANGE, GREEN, PURPLE), MARKERS, strict=False
    ):
        some = [row for row in rows if row["network"] == network and not row["less_px"]]
        shift = (networks.index(network) - 1.5) / 8
        places = [ranks.index(row["ranks"]) + shift for row in some]
        values = [row["weights"] for row in some]
        axes.plot(places, values, marker, color=colour, alpha=0.6, label=network)
    some = [row for row in rows if row["less_px"]]
    places = [ranks.index(row["ranks"]) for row in some]
    axes.plot(places, [row["weights"] for row in some], "x", color=RED, label="a halo too small")
    goal = _goal(result, "final weights differ relatively by")
    axes.axhline(goal, ls=":", color=GREY, label="goal: at most")
    axes.set_yscale("log")
    axes.set_ylim(1e-16, 1)
    axes.set_xticks(range(len(ranks)), [str(count) for count in ranks])
    title = "Largest relative difference of the weights, float64"
    labelled(axes, title, "ranks", "relative difference")
    axes.legend(ncols=2)


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
    logarithmic(left, [6, 24, 96, 384, 1536], [10, 100, 1000])
    labelled(left, "An epoch of the paper's run", "GPUs", "seconds", legend=2)
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
    labelled(right, title, "devices", "predicted efficiency, %", legend=2)


def pipeline(figure: "Figure", result: Result) -> None:
    """Predicted speed-up of the pipeline by partitions, and what the paper measured with six."""
    figures, tile_px = result["figures"], 512
    axes = figure.subplots()
    parts = range(1, 7)
    axes.plot(parts, parts, "--", color=GREY, label="linear")
    rows = figures["two micro-batches per partition, tilenet's balances"]
    rows = [row for row in rows if row["tile_px"] == tile_px]
    paper = {row["model"]: row for row in figures["six partitions"] if row["tile_px"] == tile_px}
    for row, colour, marker in zip(rows, (BLUE, ORANGE, GREEN), MARKERS, strict=False):
        gains = [row[f"{count} partitions"] for count in parts]
        axes.plot(parts, gains, f"{marker}-", color=colour, label=row["model"])
        theirs = paper[row["model"]]["paper's balance, m = 12"]
        axes.plot(6, theirs, marker, color=colour, markerfacecolor="white")
    axes.plot([], [], "o", color=GREY, markerfacecolor="white", label="the paper's balance")
    measured = [one for row in figures["six partitions"] if (one := row["paper measured"])]
    low, high = min(measured), max(measured)
    axes.bar(6.2, high - low, 0.07, bottom=low, color=RED, label="measured by the paper")
    axes.set_ylim(0.8, 6.2)
    title = f"Predicted for Summit: tiles of {tile_px}², two micro-batches per partition"
    labelled(axes, title, "partitions, one GPU each", "speed-up over one GPU")


def exchange(figure: "Figure", result: Result) -> None:
    """Halos exchanged against overlapping tiles: computed pixels, and seconds of a step."""
    left, right = figure.subplots(1, 2)
    ways = ("overlap", "exchange", "no communication")
    rows = [row for row in result["figures"]["work"] if row["size"] == 10_000]
    bars = {way: [row[way] for row in rows] for way in ways[:2]}
    presets = [row["preset"].replace("-", "\n") for row in rows]
    grouped(left, presets, bars, (ORANGE, BLUE))
    left.axhline(1, ls="--", color=GREY)
    labelled(left, "Work of 16 ranks on 10 000²", "", "computed, over the image")
    rows = [row for row in result["figures"]["step"] if row["norm"] == "none"]
    ranks = sorted({row["ranks"] for row in rows})
    found = {(row["way"], row["ranks"]): row["seconds"] for row in rows}
    bars = {way: [found[way, count] for count in ranks] for way in ways}
    grouped(right, [str(count) for count in ranks], bars, (ORANGE, BLUE, GREY))
    side = result["figures"]["side_px"]
    title = f"A step on {side}², {_cores(result)} cores"
    labelled(right, title, "ranks", "seconds")


def model(figure: "Figure", result: Result) -> None:
    """Predicted against measured seconds of steps that the calibration has not seen."""
    figure.set_size_inches(WIDTH, 4)
    axes = figure.subplots()
    points = result["figures"]["points"]
    every = [point[key] for point in points for key in ("measured_s", "step_s")]
    ends = [min(every) / 1.4, max(every) * 1.4]
    axes.fill_between(
        ends, [0.8 * end for end in ends], [1.2 * end for end in ends], color=PALE, label="± 20 %"
    )
    axes.plot(ends, ends, "--", color=GREY, label="equal")
    kinds: dict[str, list[Any]] = {}
    for point in points:
        halo = f", {point['halo_mode']}" if point["ranks"] > 1 else ""
        kinds.setdefault(f"{_ranks(point['ranks'])}{halo}", []).append(point)
    for number, (kind, some) in enumerate(kinds.items()):
        took, says = ([one[key] for one in some] for key in ("measured_s", "step_s"))
        colour = (BLUE, ORANGE, GREEN, RED, PURPLE)[number % 5]
        axes.plot(took, says, MARKERS[number % 5], color=colour, label=kind)
    places = [first * 10.0**n for n in range(-3, 4) for first in (1, 2, 5)]
    places = [place for place in places if ends[0] <= place <= ends[1]]
    logarithmic(axes, places, places)
    axes.set(xlim=ends, ylim=ends)
    labelled(axes, "A training step", "measured, seconds", "predicted, seconds")


def scaling(figure: "Figure", result: Result) -> None:
    """Weak and strong scaling of training on one machine: seconds of a step, and efficiency."""
    panels = figure.subplots(1, 2)
    runs = result["figures"]["runs"]
    ranks, cores = sorted({run["ranks"] for run in runs}), _cores(result)
    for key, axes in zip(("seconds", "efficiency"), panels, strict=True):
        for kind, colour, marker in zip(
            ("images", "overlap", "exchange"), (GREEN, ORANGE, BLUE), MARKERS, strict=False
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
    labelled(panels[0], "Seconds of a training step", "ranks", "seconds", legend=0)
    labelled(panels[1], "Efficiency", "ranks", "of one rank's", legend=0)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, handlelength=1.6)


def lms(figure: "Figure", result: Result) -> None:
    """The largest image under a device limit, by what is done where memory does not suffice."""
    axes = figure.subplots()
    networks = result["figures"]["networks"]
    ways = ("checkpointing", "swap", "auto")
    bars = {way: [one["pixels_over_off"][way] for one in networks.values()] for way in ways}
    grouped(axes, list(networks), bars, (ORANGE, BLUE, GREEN))
    theirs = [(n, one["articles"]) for n, one in enumerate(networks.values()) if one["articles"]]
    axes.plot(*zip(*theirs, strict=True), "*", color=RED, markersize=9, label="IBM's articles")
    axes.axhline(1, ls="--", color=GREY)
    title = f"Largest image in {result['figures']['limit_mib']:.0f} MiB of device memory"
    labelled(axes, title, "network", "pixels, over those with neither")


def memory(figure: "Figure", result: Result) -> None:
    """Predicted over measured peak memory of each device in real training steps."""
    axes = figure.subplots()
    rows = [row for row in result["figures"].values() if isinstance(row, dict)]
    took = [one for row in rows for one in _partitions(row["measured"])]
    for way, key, marker in (
        ("dry run", "predicted", "s"),
        ("formula, which plans", "formula", "o"),
    ):
        says = [one for row in rows for one in _partitions(row[key])]
        errors = [100 * (one / real - 1) for one, real in zip(says, took, strict=True)]
        colour, fill = (BLUE, BLUE) if key == "predicted" else (RED, "none")
        places = [one / MIB for one in took]
        axes.plot(places, errors, marker, color=colour, markerfacecolor=fill, label=way)
    axes.axhline(0, ls="--", color=GREY)
    axes.set_xlim(left=0)
    labelled(axes, "Error of a device's predicted peak", "measured, MiB", "predicted too much, %")


def leaks(figure: "Figure", result: Result) -> None:
    """Resident memory of each rank over the steps of training, from a quarter of them on."""
    axes = figure.subplots()
    for mode, colour, line in (("overlap", ORANGE, "-"), ("exchange", BLUE, "--")):
        for number, counts in enumerate(result["figures"][mode]["ranks"]):
            # the last is of after the run
            held = list(zip(counts["step"], counts["rss_bytes"], strict=True))[:-1]
            held = [one for one in held if one[0] >= counts["step"][-1] / 4]
            steps = [step for step, _ in held]
            more = [(count - held[0][1]) / MIB for _, count in held]
            axes.plot(steps, more, line, color=colour, label=mode if number == 0 else None)
    goal = _goal(result, "MiB added in all")
    axes.axhline(goal, ls=":", color=GREY, label="goal: at most")
    axes.set_ylim(bottom=-0.5)
    labelled(axes, "Added resident memory, a line for each rank", "step", "MiB")


def soak(figure: "Figure", result: Result) -> None:
    """How the runs were killed, and at which moments."""
    launchers = result["figures"]["launchers"]
    panels = figure.subplots(1, 2)
    for of, title, axes in zip(("kills", "moments"), ("kind", "moment"), panels, strict=True):
        total = sum((Counter(one[of]) for one in launchers.values()), Counter[str]())
        names = sorted(total, key=lambda kind: (total[kind], kind))
        start = [0] * len(names)
        for (name, one), colour in zip(launchers.items(), (BLUE, ORANGE), strict=False):
            wide = [one[of].get(kind, 0) for kind in names]
            axes.barh(names, wide, left=start, color=colour, label=f"under {name}")
            start = [begun + more for begun, more in zip(start, wide, strict=True)]
        axes.grid(visible=False, axis="y")
        legend = 1 if of == "kills" else 0
        labelled(axes, f"{total.total()} kills, by {title}", "kills", "", legend=legend)


def store(figure: "Figure", result: Result) -> None:
    """Peak of the fullest of six devices by micro-batches, with maps there and on the host."""
    axes = figure.subplots()
    rows = [row for row in result["figures"]["peaks"] if row["balance"] == "planned"]
    counts = [row["micro_batches"] for row in rows]
    for where, colour, marker in (("devices", ORANGE, "s"), ("host", BLUE, "o")):
        peaks = [row[where]["dry_run_mib"] for row in rows]
        axes.plot(counts, peaks, f"{marker}-", color=colour, label=f"maps on the {where}")
    axes.set_xticks(counts)
    axes.set_ylim(bottom=0)
    labelled(axes, "Peak of the fullest of six devices", "micro-batches of 512²", "MiB")


def reduction(figure: "Figure", result: Result) -> None:
    """Seconds that a sum of all gradients over ranks adds to a backward that only writes them."""
    axes = figure.subplots()
    rows = result["figures"]["alone"]
    names = [f"{row['network']},\n{_ranks(row['ranks'])}" for row in rows]
    ways = {"ours": BLUE, "ddp": ORANGE, "pieces": GREEN, "one message": PURPLE}
    bars = {way: [row["seconds"][way] - row["seconds"]["none"] for row in rows] for way in ways}
    grouped(axes, names, bars, tuple(ways.values()))
    labelled(axes, "Sums of gradients", "parameters", "seconds")


def end_to_end(figure: "Figure", result: Result) -> None:
    """Seconds of each command of the demo, and of the same arithmetic in bare torch."""
    figure.set_size_inches(WIDTH, 2.8)
    figures = result["figures"]
    axes = figure.subplots()
    took = {row["command"]: row["seconds"] for row in reversed(figures["commands"])}
    axes.barh(list(took), list(took.values()), color=BLUE, label="tilenet")
    colours = zip((ORANGE, GREEN), (0.2, -0.2), strict=True)
    for (whose, floor), (colour, aside) in zip(figures["floor"].items(), colours, strict=True):
        at = [place for place, name in enumerate(took) if f"{name}_s" in floor]
        seconds = [floor[f"{name}_s"] for name in took if f"{name}_s" in floor]
        axes.barh([place + aside for place in at], seconds, 0.2, color=colour, label=whose)
    axes.grid(visible=False, axis="y")
    size = f"{figures['size_px']:,}".replace(",", " ")
    title = f"The demo on {size}², {_ranks(figures['ranks'])}"
    labelled(axes, title, "seconds", "")


def survival(figure: "Figure", result: Result) -> None:
    """Seconds from a disturbance of a Slurm job to its first new step, or to its end."""
    axes = figure.subplots()
    rows = sorted(result["figures"]["rows"], key=lambda row: -row["seconds"])
    names = [row["disturbance"] for row in rows]
    for how, says, colour in (
        ("by itself", "to its first new step, by itself", BLUE),
        ("submitted", "to its end; to be submitted again", ORANGE),
    ):
        wide = [row["seconds"] if row["resumes"] == how else 0 for row in rows]
        axes.barh(names, wide, color=colour, label=says)
    axes.grid(visible=False, axis="y")
    labelled(axes, "Disturbed jobs", "seconds", "")


PLOTS: dict[str, Callable[["Figure", Result], None]] = {
    draw.__name__: draw
    for draw in (
        end_to_end, exactness, exchange, leaks, lms, memory, model, pipeline, reduction, scaling,
        soak, store, summit, survival,
    )
}  # fmt: skip


def _partitions(entry: Any) -> list[int]:
    """Bytes of each partition, as the bench lists them."""
    return list(entry["partitions"] if isinstance(entry, dict) else entry)


def _goal(result: Result, ending: str) -> float:
    """Of the claims that end so, which share it."""
    (goal,) = {one["goal"] for one in result["claims"] if one["claim"].endswith(ending)}
    return float(goal)


def _cores(result: Result) -> int:
    """Of the machine that a bench ran on."""
    found = re.search(r"(\d+) cores", result["machine"])
    return int(found[1]) if found else 1


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"
