"""Draw docs/speed.png from what the bench scaling found: `python -m bench.plots`."""

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

from bench.report import ROOT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PICTURE", "RESULT", "figure_of"]

RESULT, PICTURE = ROOT / "bench" / "results" / "scaling.json", ROOT / "docs" / "speed.png"
# By M. Okabe and K. Ito: told apart with any colour vision
COLOURS = {"images": "#009e73", "overlap": "#e69f00", "exchange": "#0072b2"}
GREY, PALE = "#666666", "#e8e8e8"
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


def figure_of(result: dict[str, Any]) -> "Figure":
    """Weak and strong scaling of training on one machine: seconds of a step, and efficiency."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, 3.2), dpi=100, layout="constrained")
    runs = result["figures"]["runs"]
    ranks = sorted({run["ranks"] for run in runs})
    cores = int((re.findall(r"(\d+) cores", result["machine"]) or [1])[0])
    panels = {
        "seconds": ("Seconds of a training step", "seconds"),
        "efficiency": ("Efficiency", "of one rank's"),
    }
    for axes, (key, (title, unit)) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for (kind, colour), marker in zip(COLOURS.items(), "osD", strict=True):
            for way, line in (("weak", "-"), ("strong", ":")):
                some = [run for run in runs if (run["kind"], run["scaling"]) == (kind, way)]
                counts, values = [run["ranks"] for run in some], [run[key] for run in some]
                says = f"{kind}, {way}" if some else None
                axes.plot(counts, values, marker + line, color=colour, label=says)
        if ranks[-1] > cores:
            axes.axvspan(cores, ranks[-1], color=PALE, label="more ranks than cores")
        axes.set(xscale="log", title=title, xlabel="ranks", ylabel=unit)
        axes.set_xticks(ranks, [str(count) for count in ranks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
    figure.axes[1].axhline(1, ls="--", color=GREY)
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, handlelength=1.6)
    return figure


def main() -> None:
    """Draw it, with nothing of a user's own settings; the file names its result by SHA-256."""
    from matplotlib import style

    text = RESULT.read_text()
    source = {"Source": hashlib.sha256(text.encode()).hexdigest(), "Software": None}
    with style.context(["default", STYLE]):
        figure_of(json.loads(text)).savefig(PICTURE, metadata=source)


if __name__ == "__main__":
    main()
