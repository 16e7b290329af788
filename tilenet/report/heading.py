"""What was run, when, with what and on what; and the run file itself."""

from datetime import datetime

from tilenet.report.learning import best_row
from tilenet.report.markup import Markup, join, tag
from tilenet.report.run_view import RunView
from tilenet.report.tables import note, section
from tilenet.report.verdict import overfitting

__all__ = ["heading", "run_file"]


def heading(view: RunView, made: datetime) -> Markup:
    """The title, a word on what was learned, and the most important facts."""
    facts = view.facts
    lines: list[tuple[str, object]] = [("folder", str(view.folder))]
    if facts.get("began"):
        lines.append(("began", facts["began"]))
    lines.append(("report made", made.isoformat(timespec="seconds")))
    if view.history is not None:
        seconds = float(view.history.seconds("seconds").sum())
        steps = int(view.history.columns["step"][-1])
        lines.append(("steps made", f"{steps:,} in {_duration(seconds)}"))
        loss = view.history.column("loss")
        if loss is not None:
            lines.append(("last loss", f"{loss[-1]:.5g}"))
    if view.validation is not None and (at := best_row(view.validation, view.score)) is not None:
        columns = view.validation.columns
        value, step = columns[view.score][at], columns["step"][at]
        lines.append((f"best {view.score}", f"{value:.4f}, step {step:,.0f}"))
    if facts.get("parameters"):
        lines.append(("network", f"{facts['layers']} layers, {facts['parameters']:,} parameters"))
    mesh = facts.get("mesh")
    if isinstance(mesh, list) and len(mesh) == 3:
        lines.append(("ranks", f"{mesh[0]} × {mesh[1]} × {mesh[2]} (replicas × rows × columns)"))
    lines += [("machine", text) for text in facts.get("machine", ())[:8]]
    if isinstance(facts.get("versions"), dict):
        shown = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
        lines.append(("versions", shown))
    rows = [join(tag("dt", name), tag("dd", value)) for name, value in lines]
    name = view.folder.resolve().name
    title = tag("h1", name, tag("small", "a training run of tilenet"))
    word = overfitting(view)
    said = None if word is None else tag("p", word, class_="word", role="note")
    return tag("header", title, said, tag("dl", *rows))


def run_file(view: RunView) -> Markup:
    """The run file, with the values of its plan and of the command line."""
    if view.run_text is None:
        return section("Run file", note("The run did not keep its run file (run.yaml)."))
    return section("Run file", tag("pre", view.run_text.strip(), tabindex="0"))


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    if not hours and rest < 100:
        return f"{seconds:.1f} s"
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
