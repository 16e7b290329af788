"""Run benches and write bench/README.md from what they found: no figure is typed by hand.

    python -m bench.render [--run [NAME ...]]

Each program here that reports is a bench; its last line is kept in results/NAME.json, or, of those
that name their device, in results/DEVICE.json. Without --run nothing is measured. With it the named
ones are run first, or all of them where none is named.
"""

import argparse
import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.report import ROOT, device_stem

__all__ = ["WITHOUT", "benches", "rendered"]

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results"
BY_DEVICE = ("gpu",)  # there are as many results as devices
# why a bench has no result yet
WITHOUT = {
    "gpu": "it needs a GPU, and none has run it.",
}
HEAD = """# What was measured

Written by `python -m bench.render` from `bench/results/*.json`: change a bench and run it, never
this page. `make bench` runs all of them, `make bench BENCH="balance pipeline"` some. Each prints a
JSON line with the machine, the versions, the figures and the claims. A claim that does not hold is
shown as such. How each measures is in its docstring, all its figures are in the JSON;
`python -m bench.plots` draws some of them to `bench/out/`.
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
        *([f"[{name}](#{name})", _question(name), _held(name)] for name in names),
    ]
    return "\n".join([HEAD, _table(index), *map(_section, names)])


def _question(name: str) -> str:
    """First line of a bench's docstring."""
    return (ast.get_docstring(ast.parse(_programs()[name].read_text())) or "").partition("\n")[0]


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


def _held(name: str) -> str:
    kept = _kept(name)
    if not kept:
        return f"no result: {WITHOUT.get(name, 'the reason is not known.')}"
    claims = [claim for result in kept.values() for claim in result["claims"]]
    return f"{sum(claim['holds'] for claim in claims)} of {len(claims)}"


def _section(name: str) -> str:
    """Its command, its question, and the claims of each result."""
    path = _programs()[name].relative_to(BENCH)
    module = f"bench.{path.parent.name}.{name}"
    parts = [f"## {name}", "", f"[`python -m {module}`]({path}): {_question(name)}"]
    for stem, result in _kept(name).items():
        device = f"{result['figures']['device']}; " if name in BY_DEVICE else ""
        versions = ", ".join(f"{key} {value}" for key, value in result["versions"].items())
        parts += [f"On {device}{result['machine']}; {versions} ([JSON](results/{stem}.json)).", ""]
        rows = [
            [
                claim["claim"].replace("|", "\\|"),
                f"{claim['value']:.4g}",
                f"{claim['goal']:.4g}",
                "yes" if claim["holds"] else "**no**",
            ]
            for claim in result["claims"]
        ]
        parts += [_table([["claim", "value", "goal", "holds"], *rows])]
    return "\n".join(parts if _kept(name) else [*parts, ""])


def _table(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


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
    page = BENCH / "README.md.part"
    page.write_text(rendered(), encoding="utf-8")
    page.replace(BENCH / "README.md")
    if failed:
        raise SystemExit("\n".join([*failed, "what was found before is kept"]))


if __name__ == "__main__":
    main()
