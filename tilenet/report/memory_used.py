"""Memory: what the plan predicted, and what was measured."""

from tilenet.report.curves import Curve, curves
from tilenet.report.markup import Markup, tag
from tilenet.report.run_view import RunView
from tilenet.report.tables import note, section, size, table, words

__all__ = ["memory_used"]


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
