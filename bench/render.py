"""bench/README.md, made of what benches found: no figure is typed by hand."""

import ast
import json
from pathlib import Path
from typing import Any

from bench.report import device_stem

__all__ = ["WITHOUT", "benches", "keep", "programs", "question", "rendered", "write"]

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results"
BY_DEVICE = ("gpu",)  # there are as many results as devices
# why a bench has no result yet
WITHOUT = {
    "gpu": "it needs a GPU, and none has run it.",
}
HEAD = """# What was measured

Written from `bench/results/*.json` by `python -m bench NAME`, which runs a bench and keeps what it
found: change a bench and run it, never this page. `python -m bench` lists them, `--quick` runs a
smaller case and keeps nothing; `make bench` runs all of them, `make bench BENCH="balance pipeline"`
some. A claim that does not hold is shown as such. How each measures is in its docstring
(`python -m bench NAME --help`), all its figures are in the JSON, with the machine and the versions.

"""


def programs() -> dict[str, Path]:
    """The file of each bench by its name."""
    files = sorted(BENCH.glob("*/*.py"), key=lambda path: path.stem)
    return {path.stem: path for path in files if "\ndef bench(" in path.read_text()}


def benches() -> list[str]:
    """Names of all benches."""
    return list(programs())


def question(name: str) -> str:
    """First line of a bench's docstring."""
    return (ast.get_docstring(ast.parse(programs()[name].read_text())) or "").partition("\n")[0]


def keep(result: dict[str, Any]) -> None:
    """Write a result in place of the one that is kept.

    Raises:
        RuntimeError: It claims less than that.
    """
    if not result["claims"]:
        return  # it says that it could not measure here
    name = result["bench"]
    stem = device_stem(result["figures"]["device"]) if name in BY_DEVICE else name
    kept = _result(stem)
    if kept is not None and len(result["claims"]) < len(kept["claims"]):
        raise RuntimeError(
            f"{name} claims less than the result that is kept ({len(result['claims'])}, "
            f"{len(kept['claims'])}): give it what it lacks here, or delete that"
        )
    _replace(RESULTS / f"{stem}.json", json.dumps(result) + "\n")


def write() -> None:
    """Write bench/README.md."""
    _replace(BENCH / "README.md", rendered())


def rendered() -> str:
    """Its text: a row for each bench, below it its claims; then tables that benches make."""
    tables: dict[str, list[list[str]]] = {}
    rows = [["claim", "value", "goal", "holds"], ["---"] * 4]
    for name, path in programs().items():
        asks = f"**[{name}]({path.relative_to(BENCH)})**: {question(name)}"
        kept = _kept(name)
        if not kept:
            rows.append(
                [asks, f"no result: {WITHOUT.get(name, 'the reason is not known.')}", "", ""]
            )
        for stem, result in kept.items():
            on = f" {result['figures']['device']}," if name in BY_DEVICE else ""
            held = f"{sum(one['holds'] for one in result['claims'])} of {len(result['claims'])}"
            rows.append(
                [f"{asks}{on} {result['machine']}", "", f"[JSON](results/{stem}.json)", held]
            )
            rows += [_row(claim) for claim in result["claims"]]
            tables |= result["figures"].get("tables", {})
    return HEAD + _table(rows) + "".join(_section(*one) for one in tables.items())


def _section(title: str, rows: list[list[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return f"\n## {title}\n\n" + _table([cells[0], ["---"] * len(cells[0]), *cells[1:]])


def _table(rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(claim: dict[str, Any]) -> list[str]:
    says = claim["claim"].replace("|", "\\|")
    holds = "yes" if claim["holds"] else "**no**"
    return [says, f"{claim['value']:.4g}", f"{claim['goal']:.4g}", holds]


def _replace(path: Path, text: str) -> None:
    aside = path.with_name(f"{path.name}.part")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _result(stem: str) -> dict[str, Any] | None:
    path = RESULTS / f"{stem}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _kept(name: str) -> dict[str, dict[str, Any]]:
    """Results of a bench by their files' names."""
    stems = [name]
    if name in BY_DEVICE:
        stems = sorted({path.stem for path in RESULTS.glob("*.json")} - set(benches()))
    found = {stem: result for stem in stems if (result := _result(stem)) is not None}
    return {stem: result for stem, result in found.items() if result["bench"] == name}
