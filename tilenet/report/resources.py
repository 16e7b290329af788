"""What a run used: time by what it went into, and memory next to what the plan predicted."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tilenet.report.charts import COLOURS, Curve, curves, shares
from tilenet.report.parts import Cell, Drawing, Note, Pair, Part, Section, Table, number, size
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
    "exchange": "waiting for other ranks inside of layers: halos, sums of norms",
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


def time_spent(view: RunView) -> Section:
    """Shares per step, in total, and on each rank."""
    history = view.history
    if history is None or not history.seconds("seconds").any():
        return Section("Time", [Note("There is no history.csv that says how long steps took.")])
    parts, step = parts_of_time(history), history.seconds("seconds")
    totals = {name: float(values.sum()) for name, values in parts.items()}
    whole = sum(totals.values())
    rows: list[tuple[str | Cell, ...]] = [
        (name, number(totals[name], 2), f"{totals[name] / whole:.1%}", _words(MEANS[name]))
        for name in NAMES
    ]
    median = f"{len(step):,} steps, median {float(np.median(step)):.3g} s"
    rows.append(("all", number(whole, 2), "100%", _words(median)))
    table = Table("Rank 0, all steps", ("", "s", "share", ""), rows)
    drawn: list[Part] = [
        Pair([_shares(history.columns["step"], parts), table]),
        _ranks(view),
    ]
    if history.column("exchange_seconds") is None:
        drawn.append(Note("This run did not count exchanges; they are in compute."))
    if view.validation is not None:
        seconds = view.validation.seconds("seconds")
        said = f"{len(seconds):,} validations, {seconds.sum():,.1f} s"
        drawn.append(Note(f"Besides the steps: {said}."))
    return Section("Time", drawn)


def _words(text: str) -> Cell:
    return Cell(text, text_cell=True)


def _shares(steps: NDArray[np.float64], parts: Mapping[str, NDArray[np.float64]]) -> Drawing:
    """Shares over steps, one on another."""
    groups = np.array_split(np.arange(len(steps)), min(MOST_COLUMNS, len(steps)))
    sums = np.array([[parts[name][group].sum() for group in groups] for name in NAMES])
    edges = np.array([steps[group[0]] - 1 for group in groups] + [steps[-1]])
    alt = "Shares of each step's time on rank 0: " + ", ".join(NAMES)
    return shares(edges, sums, NAMES, alt)


def _ranks(view: RunView) -> Part:
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
        return Note("There is no timings.json: the run has not ended, or is older than these.")
    rows: list[tuple[str | Cell, ...]] = [
        # The least and the most of each part are of several ranks: together they are no time.
        (name, *(number(v, 2) for v in values), Cell() if name in ENDS else _stack(values, longest))
        for name, values in bars
    ]
    who = f"All {len(ranks):,} ranks" if len(ranks) > 1 else "The one rank"
    caption = f"{who}, steps {first:,} to {last:,}: seconds"
    return Table(caption, ("", *NAMES, "of the longest"), rows)


def _stack(values: Sequence[float], longest: float) -> Cell:
    """A bar of parts."""
    parts = zip(values, COLOURS, NAMES, strict=False)
    bar = [
        (f"{100 * part / longest:.2f}", colour, name) for part, colour, name in parts if part > 0
    ]
    return Cell(bar=bar)


def memory_used(view: RunView) -> Section:
    """A table of bytes, and the peak over the steps."""
    on_gpu = any("cuda" in str(device) for device in view.facts.get("devices", ()))
    where = "tensors on the fullest GPU" if on_gpu else "resident memory of the process"
    rows: list[tuple[str, str, Cell]] = []
    planned = view.facts.get("planned")
    if isinstance(planned, dict):
        rows.append(("planned", size(planned.get("device_bytes")), _words("the fullest device")))
        rows.append(
            ("planned", size(planned.get("host_bytes")), _words("of the node's memory, a rank"))
        )
    table_of = view.history
    peak = None if table_of is None else table_of.column("peak_bytes")
    try:
        timings = view.timings
        peaks = [float(rank["peak_bytes"]) for rank in timings["ranks"]]
        if len(peaks) > 1 or peak is None:
            rows.append(
                ("measured, least", size(min(peaks)), _words(f"{where}, of {len(peaks):,} ranks"))
            )
            rows.append(
                ("measured, most", size(max(peaks)), _words(f"rank {peaks.index(max(peaks))}"))
            )
    except (KeyError, TypeError, ValueError):
        pass
    drawn = None
    if table_of is not None and peak is not None:
        rows.append(("measured, rank 0", size(float(peak[peak == peak].max())), _words(where)))
        line = Curve("peak so far", table_of.columns["step"], peak / 2**20)
        alt = "Most memory that rank 0 has held up to each step"
        drawn = curves([line], alt, "MiB", from_zero=True, log=False)
    if not rows:
        missing = "Neither a plan nor a measurement of memory is there."
        return Section("Memory", [Note(missing)])
    table = Table("Bytes", ("", "peak", ""), rows)
    parts: list[Part] = [Pair([table] if drawn is None else [drawn, table])]
    if not isinstance(planned, dict):
        parts.append(Note("The run had no plan (key plan), so nothing was predicted."))
    return Section("Memory", parts)
