"""The time that a run's steps took, by activity, and its memory next to the plan's prediction."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tilenet.report.run_view import RunView, Section
from tilenet.storage.tables import RunTable

# Activities, each with its column in history.csv and timings.json; compute is the rest of a step.
PARTS = {
    "compute": "compute_seconds",
    "read": "read_seconds",
    "exchange": "exchange_seconds",
    "reduce": "reduce_seconds",
    "swap wait": "swap_wait_seconds",
    "all": "seconds",
}
MEANS = (
    "Seconds by activity. read: reading pixels and labels from files; exchange: waiting for other "
    "ranks inside of layers (halos, sums of norms); reduce: waiting for the sum of gradients after "
    "the last backward; swap wait: waiting for swapped tensors; compute: the rest."
)
MOST_RANKS = 48  # with more, ranks have no rows of their own
ENDS = ("least", "mean", "most")


def resources(view: RunView) -> Section:
    """Time and memory of rank 0 and of each rank, as one table."""
    gpu = any(not str(device).startswith("cpu") for device in view.facts.get("devices", ()))
    where = "tensors on the fullest GPU" if gpu else "resident memory of the process"
    notes, rows = [MEANS, f"Peak memory: {where}."], []
    planned = view.facts.get("planned")
    if isinstance(planned, dict):
        host = f"{_size(planned.get('host_bytes'))} of the node's memory"
        peak = f"{_size(planned.get('device_bytes'))} on the fullest device, {host}"
        rows.append(["planned, per rank", *["–"] * len(PARTS), peak])
    if view.history is not None:
        seconds = _seconds(view.history)
        rows.append(_row("rank 0, all steps", seconds))
        whole = sum(seconds[PARTS[name]] for name in PARTS if name != "all") or 1.0
        shares = [f"{seconds[column] / whole:.1%}" for column in PARTS.values()]
        rows.append(["share of a step", *shares[:-1], "100%", "–"])
        median = float(np.median(view.history.seconds("seconds")))
        notes.append(f"{len(view.history):,} steps on rank 0, median {median:.3g} s.")
    try:
        rows += _ranks(view.timings)
    except (KeyError, TypeError, ValueError):
        notes.append("There is no timings.json: the run has not ended, or its tilenet is older.")
    if view.validation is not None:
        seconds_each = view.validation.seconds("seconds")
        count, total = len(seconds_each), seconds_each.sum()
        notes.append(f"Besides the steps: {count:,} validations, {total:,.1f} s.")
    table = {"caption": "Time and memory", "heads": ["", *PARTS, "peak memory"], "rows": rows}
    return {"tables": [table] if rows else [], "notes": notes}


def _seconds(history: RunTable) -> dict[str, float]:
    """Seconds of each activity over all steps of rank 0, and its peak memory."""
    waits = {name: history.seconds(column) for name, column in PARTS.items() if name != "compute"}
    step = waits.pop("all")
    sums = {PARTS[name]: float(values.sum()) for name, values in waits.items()}
    compute = np.maximum(step - np.sum(list(waits.values()), axis=0), 0.0)
    peak = history.column("peak_bytes")
    return sums | {
        "compute_seconds": float(compute.sum()),
        "seconds": float(step.sum()),
        "peak_bytes": float("nan") if peak is None else float(np.nanmax(peak)),
    }


def _ranks(timings: Mapping[str, Any]) -> list[list[str]]:
    """A row for each rank, so that a slow one is seen, and rows for the least, mean and most."""
    ranks, rows = timings["ranks"], []
    steps = f"steps {timings['first_step']:,} to {timings['last_step']:,}"
    if len(ranks) <= MOST_RANKS:
        rows += [_row(f"rank {number}, {steps}", rank) for number, rank in enumerate(ranks)]
    if len(ranks) > 1:
        rows += [_row(f"{name} of {len(ranks):,} ranks", timings[name]) for name in ENDS]
    return rows


def _row(name: str, values: Mapping[str, Any]) -> list[str]:
    seconds = [f"{float(values[column]):,.2f}" for column in PARTS.values()]
    return [name, *seconds, _size(values["peak_bytes"])]


def _size(num_bytes: Any) -> str:
    """Bytes in MiB or GiB; a dash where they are unknown."""
    if num_bytes is None or num_bytes != num_bytes:  # NaN
        return "–"
    mib = float(num_bytes) / 2**20
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.2f} MiB"
