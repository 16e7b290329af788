"""Where the time went: reading, computing, and waiting for other ranks and for copies.

Memory: what the plan predicted, and what was measured.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tilenet.report.charts import COLOURS, Axes, Curve, chart, curves, legend, path_of
from tilenet.report.html import Markup, note, number, section, size, table, tag, words
from tilenet.report.run_view import RunView
from tilenet.storage.tables import RunTable

__all__ = ["memory_used", "parts_of_time", "time_spent"]

# Each with its column in history.csv; what is left of a step is computing.
PARTS = (
    ("read", "read_seconds"),
    ("exchange", "exchange_seconds"),
    ("reduce", "reduce_seconds"),
    ("wait", "swap_wait_seconds"),
)
NAMES = ("compute", *(name for name, _ in PARTS))
MEANS = {
    "compute": "the rest: forward, backward, update",
    "read": "pixels and labels from files",
    "exchange": "waiting for other ranks inside of layers: rims, sums of norms",
    "reduce": "waiting for the sum of gradients after the last backward",
    "wait": "waiting for swapped tensors",
}
MOST_COLUMNS = 120
MOST_RANKS = 48  # that have a bar each
ENDS = ("least", "most")


def parts_of_time(history: RunTable) -> dict[str, NDArray[np.float64]]:
    """Seconds of each step on rank 0, by what they went into; they add up to the step's."""
    found = {name: history.seconds(column) for name, column in PARTS}
    waits = np.sum(list(found.values()), axis=0)
    return {"compute": np.maximum(history.seconds("seconds") - waits, 0.0), **found}


def time_spent(view: RunView) -> Markup:
    """Shares per step, in total, and on each rank."""
    history = view.history
    if history is None or not history.seconds("seconds").any():
        return section("Time", note("There is no history.csv that says how long steps took."))
    parts = parts_of_time(history)
    totals = {name: float(values.sum()) for name, values in parts.items()}
    whole = sum(totals.values())
    step = history.seconds("seconds")
    rows = [
        (name, number(totals[name], 2), f"{totals[name] / whole:.1%}", words(MEANS[name]))
        for name in NAMES
    ]
    rows.append(
        ("all", number(whole, 2), "100%", words(f"{len(step):,} steps, median {_per_step(step)}"))
    )
    shares = _shares(history.columns["step"], parts)
    drawn: list[object] = [
        tag("div", shares, table("Rank 0, all steps", ("", "s", "share", ""), rows), class_="pair"),
        _ranks(view),
    ]
    if history.column("exchange_seconds") is None:
        drawn.append(note("This run did not count exchanges; they are in compute."))
    if view.validation is not None:
        seconds = view.validation.seconds("seconds")
        said = f"{len(seconds):,} validations, {seconds.sum():,.1f} s"
        drawn.append(note(f"Besides the steps: {said}."))
    return section("Time", *drawn)


def _per_step(step: NDArray[np.float64]) -> str:
    return f"{float(np.median(step)):.3g} s"


def _shares(steps: NDArray[np.float64], parts: Mapping[str, NDArray[np.float64]]) -> Markup:
    """Shares over steps, one on another."""
    groups = np.array_split(np.arange(len(steps)), min(MOST_COLUMNS, len(steps)))
    sums = np.array([[parts[name][group].sum() for group in groups] for name in NAMES])
    shares = 100 * np.cumsum(sums, axis=0) / np.maximum(sums.sum(axis=0), 1e-300)
    edges = np.array([steps[group[0]] - 1 for group in groups] + [steps[-1]])
    axes = Axes((float(edges[0]), float(edges[-1])), (0.0, 100.0))
    x = np.repeat(axes.across(edges), 2)[1:-1]
    below = np.zeros(len(groups))
    drawn = []
    for number_of, top in enumerate(shares):
        over, under = (np.repeat(axes.down(line), 2) for line in (top, below))
        points = f"{path_of(x, over)} {path_of(x[::-1], under[::-1])}"
        drawn.append(tag("polygon", points=points, fill=COLOURS[number_of]))
        below = top
    alt = "Shares of each step's time on rank 0: " + ", ".join(NAMES)
    picture = chart(axes, alt, ("step", "share of a step [%]"), *drawn)
    return tag("figure", picture, legend(list(zip(COLOURS, NAMES, strict=False))))


def _ranks(view: RunView) -> Markup | None:
    """Ranks next to one another, so that a slow one is seen."""
    timings = view.timings
    try:
        ranks = timings["ranks"]
        columns = [f"{name}_seconds" if name != "wait" else "swap_wait_seconds" for name in NAMES]
        first, last = int(timings["first_step"]), int(timings["last_step"])
        shown = [(f"rank {n}", rank) for n, rank in enumerate(ranks)]
        if len(ranks) > MOST_RANKS:
            shown = []
        if len(ranks) > 1:
            shown += [(name, timings[name]) for name in ("least", "mean", "most")]
        longest = float(timings["most"]["seconds"]) or 1.0
        bars = [(who, [float(of[column]) for column in columns]) for who, of in shown]
    except (KeyError, TypeError, ValueError):
        return note("There is no timings.json: the run has not ended, or is older than these.")
    rows = [
        # The least and the most of each part are of several ranks: together they are no time.
        (name, *(number(v, 2) for v in values), "" if name in ENDS else _stack(values, longest))
        for name, values in bars
    ]
    who = f"All {len(ranks):,} ranks" if len(ranks) > 1 else "The one rank"
    caption = f"{who}, steps {first:,} to {last:,}: seconds"
    return table(caption, ("", *NAMES, "of the longest"), rows)


def _stack(values: Sequence[float], longest: float) -> Markup:
    """A bar of parts in a cell."""
    parts = [
        tag("i", style=f"width:{100 * value / longest:.2f}%;background:{colour}", title=name)
        for value, colour, name in zip(values, COLOURS, NAMES, strict=False)
        if value > 0
    ]
    return tag("td", tag("div", *parts, class_="bar"))


def memory_used(view: RunView) -> Markup:
    """A table of bytes, and the peak over the steps."""
    on_gpu = any("cuda" in str(device) for device in view.facts.get("devices", ()))
    where = "tensors on the fullest GPU" if on_gpu else "resident memory of the process"
    rows: list[tuple[str, str, str]] = []
    planned = view.facts.get("planned")
    if isinstance(planned, dict):
        rows.append(("planned", size(planned.get("device_bytes")), "the fullest device"))
        rows.append(("planned", size(planned.get("host_bytes")), "of the node's memory, a rank"))
    table_of = view.history
    peak = None if table_of is None else table_of.column("peak_bytes")
    try:
        timings = view.timings
        peaks = [float(rank["peak_bytes"]) for rank in timings["ranks"]]
        if len(peaks) > 1 or peak is None:
            rows.append(("measured, least", size(min(peaks)), f"{where}, of {len(peaks):,} ranks"))
            rows.append(("measured, most", size(max(peaks)), f"rank {peaks.index(max(peaks))}"))
    except (KeyError, TypeError, ValueError):
        pass
    drawn = None
    if table_of is not None and peak is not None:
        rows.append(("measured, rank 0", size(float(peak[peak == peak].max())), where))
        line = Curve("peak so far", table_of.columns["step"], peak / 2**20)
        alt = "Most memory that rank 0 has held up to each step"
        drawn = curves([line], alt, "MiB", from_zero=True, log=False)
    if not rows:
        return section("Memory", note("Neither a plan nor a measurement of memory is there."))
    found = table("Bytes", ("", "peak", ""), [(a, b, words(c)) for a, b, c in rows])
    absent = None
    if not isinstance(planned, dict):
        absent = note("The run had no plan (key plan), so nothing was predicted.")
    return section("Memory", tag("div", drawn, found, class_="pair"), absent)
