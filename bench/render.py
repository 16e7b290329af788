"""Run benches and write bench/README.md from what they found: no figure is typed by hand.

    python -m bench.render [--run [NAME ...]]

Plots are drawn along, to plots/NAME.svg (plots.py).
Each program here that reports is a bench; its last line is kept in results/NAME.json, or, of those
that name their device, in results/DEVICE.json. Without --run nothing is measured. With it the named
ones are run first, or all of them where none is named.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.plots import PLOTS, drawn, said
from bench.report import ROOT, device_stem

__all__ = ["WITHOUT", "benches", "plotted", "rendered"]

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results"
MOST_ROWS, MOST_COLUMNS, MOST_CHARACTERS = 24, 12, 60
BY_DEVICE = ("gpu",)  # there are as many results as devices
# why a bench has no result yet
WITHOUT = {
    "gpu": "it needs a GPU, and none has run it.",
}
HEAD = """# What was measured

Written by `python -m bench.render` from `bench/results/*.json`: change a bench and run it, never
this page. `make bench` runs all of them, `make bench BENCH="balance pipeline"` some. Each prints a
JSON line with the machine, the versions, the figures and the claims. A claim that does not hold is
shown as such. Longer tables and lists are in the JSON.
"""


def benches() -> list[str]:
    """Names of all benches: the programs that report under their own name."""
    return sorted(_programs())


def _programs() -> dict[str, Path]:
    """The file of each bench by its name."""
    files = sorted(BENCH.glob("*/*.py"))
    return {path.stem: path for path in files if f'report("{path.stem}"' in path.read_text()}


def run(name: str) -> None:
    """Run a bench and keep its last line.

    Raises:
        RuntimeError: It failed, or its last line is not what a bench prints.
    """
    print(f"== {name}", flush=True)
    folder = _programs()[name].parent.name
    with subprocess.Popen(
        [sys.executable, "-m", f"bench.{folder}.{name}"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as running:
        assert running.stdout is not None
        last = ""
        for line in running.stdout:
            if last:
                print(last, end="", flush=True)
            last = line
    result = _json(last)
    if running.returncode or result.get("bench") != name:
        raise RuntimeError(f"{name} ended with {running.returncode} and no result: {last.strip()}")
    if not result["claims"]:
        return  # it says that it could not measure here
    stem = device_stem(result["figures"]["device"]) if name in BY_DEVICE else name
    kept = _result(stem)
    if kept is not None and len(result["claims"]) < len(kept["claims"]):
        raise RuntimeError(
            f"{name} claims less than the result that is kept ({len(result['claims'])}, "
            f"{len(kept['claims'])}): give it what it lacks here, or delete that"
        )
    aside = RESULTS / f"{stem}.json.part"
    aside.write_text(last)
    aside.replace(RESULTS / f"{stem}.json")


def _failure(name: str) -> str:
    """Run a bench; say what was wrong, if anything was."""
    try:
        run(name)
    except RuntimeError as error:
        return str(error)
    return ""


def _json(line: str) -> dict[str, Any]:
    try:
        read = json.loads(line)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def rendered() -> str:
    """The text of bench/README.md."""
    names = benches()
    index = [
        ["bench", "question", "claims that hold"],
        *([f"[{name}](#{name})", _said(name)[0], _held(name)] for name in names),
    ]
    sections = (_section(name) for name in names)
    return "\n".join([HEAD, _table(index), *sections]).rstrip() + "\n"


def plotted() -> dict[str, str]:
    """The text of each bench's plot that has a result, by name."""
    results = {name: _result(name) for name in sorted(PLOTS)}
    return {name: drawn(name, result) for name, result in results.items() if result is not None}


def _said(name: str) -> tuple[str, str]:
    """First line of a bench's docstring, and what it says after the command."""
    words = ast.get_docstring(ast.parse(_programs()[name].read_text())) or ""
    question, _, rest = words.partition("\n\n")
    return question, rest.partition("\n\n")[2]


def _result(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _kept(name: str) -> dict[str, dict[str, Any]]:
    """Results of a bench by their files' names."""
    stems = [name]
    if name in BY_DEVICE:
        stems = sorted({path.stem for path in RESULTS.glob("*.json")} - set(benches()))
    found = {stem: result for stem in stems if (result := _result(stem)) is not None}
    return {stem: result for stem, result in found.items() if result["bench"] == name}


def _why_not(name: str) -> str:
    return WITHOUT.get(name, "nobody has said why.")


def _held(name: str) -> str:
    kept = _kept(name)
    if not kept:
        return f"no result: {_why_not(name)}"
    claims = [claim for result in kept.values() for claim in result["claims"]]
    return f"{sum(claim['holds'] for claim in claims)} of {len(claims)}"


def _section(name: str) -> str:
    question, words = _said(name)
    parts = ["", f"## {name}", "", question, "", words.strip(), ""]
    kept = _kept(name)
    if not kept:
        return "\n".join([*parts, f"No result yet: {_why_not(name)}", ""])
    for stem, result in kept.items():
        parts += _shown(name, stem, result)
    return "\n".join(parts)


def _shown(name: str, stem: str, result: dict[str, Any]) -> list[str]:
    """One result of a bench."""
    parts = [f"### {result['figures']['device']}", ""] if name in BY_DEVICE else []
    versions = ", ".join(f"{key} {value}" for key, value in result["versions"].items())
    parts += [f"On {result['machine']}; {versions}. [JSON](results/{stem}.json)", ""]
    if name in PLOTS:
        parts += [f"![{said(name)}](plots/{name}.svg)", ""]
    if result["claims"]:
        rows = [
            [
                claim["claim"].replace("|", "\\|"),
                _cell(claim["value"]),
                _cell(claim["goal"]),
                _holds(claim["holds"]),
            ]
            for claim in result["claims"]
        ]
        parts += [_table([["claim", "value", "goal", "holds"], *rows])]
    return parts + _figures(result["figures"], "")


def _holds(holds: bool) -> str:
    return "yes" if holds else "**no**"


def _figures(figures: dict[str, Any], title: str) -> list[str]:
    """Tables of what lies side by side, each under its place in the JSON."""
    parts = []
    plain = {key: value for key, value in figures.items() if not _nested(value)}
    if plain:
        text = "; ".join(f"{key}: {_cell(value)}" for key, value in plain.items())
        parts.append(f"{title}: {text}\n" if title else f"{text}\n")
    named = {key: value for key, value in figures.items() if isinstance(value, dict)}
    if len(named) > 1 and _alike(list(named.values())):
        parts.append(_listed(title, [{"": key, **value} for key, value in named.items()]))
        named = {}
    for key, value in figures.items():
        under = f"{title} / {key}" if title else key
        if key in named:
            parts += _figures(value, under)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            parts.append(_listed(under, value))
    return parts


def _alike(rows: list[dict[str, Any]]) -> bool:
    """Whether they make a table: each shares a plain figure with the first."""
    plain = [{key for key in row if not _nested(row[key])} for row in rows]
    return all(plain[0] & keys for keys in plain)


def _listed(title: str, rows: list[dict[str, Any]]) -> str:
    """Their plain figures as a table, if it stays small; else how many rows there are."""
    flat = [{key: row[key] for key in row if not _nested(row[key])} for row in rows]
    keys = {key for row in flat for key in row}
    if len(rows) > MOST_ROWS or not 3 <= len(keys) <= MOST_COLUMNS:
        return f"{title or 'Figures'}: {len(rows)} rows, in the JSON\n"
    return f"{title}\n\n{_table(_rows(flat))}" if title else _table(_rows(flat))


def _rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return [keys, *([_cell(row.get(key)) for key in keys] for row in rows)]


def _nested(value: Any) -> bool:
    """Whether a value is more than a cell can show."""
    if isinstance(value, list):
        return any(isinstance(one, (dict, list)) for one in value)
    return isinstance(value, dict)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    if isinstance(value, str) and value.startswith("/"):
        return Path(value).name  # of a file that is gone
    words = re.sub(r"\s+", " ", str(value)).replace("|", "\\|")
    return words if len(words) <= MOST_CHARACTERS else words[: MOST_CHARACTERS - 1] + "…"


def _table(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    aside = path.with_name(f"{path.name}.part")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def main() -> None:
    """Run what is asked for, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", nargs="*", metavar="NAME", help="run these; none named: all")
    names = parser.parse_args().run
    unknown = sorted(set(names or ()) - set(benches()))
    if unknown:
        parser.error(f"no bench is called {unknown[0]} (there are: {', '.join(benches())})")
    wanted = [] if names is None else names or benches()
    failed = [says for name in wanted if (says := _failure(name))]
    for name, text in plotted().items():
        _write(BENCH / "plots" / f"{name}.svg", text)
    _write(BENCH / "README.md", rendered())
    if failed:
        raise SystemExit("\n".join([*failed, "what was found before is kept"]))


if __name__ == "__main__":
    main()
