"""The rules of the house that no other tool checks."""

import ast
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from docs import keys
from tilenet.__main__ import main
from tilenet.training.config.run_file import RunFile

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "tilenet").rglob("*.py"))


def test_modules_say_what_they_are_and_stay_small() -> None:
    texts = {path: path.read_text() for path in SOURCES}
    assert [p for p, text in texts.items() if text and not ast.get_docstring(ast.parse(text))] == []
    assert [path for path, text in texts.items() if len(text.splitlines()) > 500] == []
    vague = re.compile(r"util|common|helper|misc|(?<!s)core")
    assert [path for path in SOURCES if vague.search(path.stem)] == []


def test_functions_and_imports_stay_few_and_short() -> None:
    long, many = [], []
    for path in SOURCES:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        functions = (node for node in nodes if isinstance(node, ast.FunctionDef))
        long += [(path, f.name) for f in functions if (f.end_lineno or 0) - f.lineno >= 60]
        imports = (node.module or "" for node in nodes if isinstance(node, ast.ImportFrom))
        ours = {module for module in imports if module.startswith("tilenet.")} - {"tilenet.mpi"}
        if len(ours) > {"own_data.py": 19, "predict.py": 19}.get(path.name, 17):
            many.append(path)
    assert (long, many) == ([], [])


def test_names_say_what_a_value_is() -> None:
    words = {"found", "one", "asked", "made", "given", "kept", "wanted", "shown", "there", "seen"}
    vague = set()
    for path in (*SOURCES, *ROOT.glob("launch/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case (
                    ast.arg(arg=name)
                    | ast.Name(id=name, ctx=ast.Store())
                    | ast.Attribute(attr=name, ctx=ast.Store())
                ) if name.lstrip("_") in words:
                    vague.add((*path.parts[-2:], name))
    assert vague == {("geometry", "layers.py", "kept")}  # a field of network.json


def test_a_room_reads_like_a_table_of_contents() -> None:
    modules = Counter(path.parent for path in SOURCES if path.name != "__init__.py")
    assert modules
    assert [room for room, count in modules.items() if count > 18] == []


def test_the_first_command_stands_before_line_12_of_the_readme() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert any(line.startswith("make demo") for line in lines[:11])


def test_the_table_of_keys_is_that_of_the_fields() -> None:
    text = keys.PAGE.read_text(encoding="utf-8")
    assert text == keys.with_table(text), "run python docs/keys.py"
    assert len(keys.table(RunFile).splitlines()) > 80


def test_the_site_has_every_page_once() -> None:
    """`make docs`, which the gate does not run, fails where one is missing."""
    pages = re.findall(
        r"^ +- (?:\w+: )?([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE
    )
    ours = {path.name for path in ROOT.glob("docs/*.md")} - {"README.md"}
    outside = {"index.md", "api.md", "bench.md", "jobs.md", "contributing.md", "changelog.md"}
    assert sorted(pages) == sorted(ours | outside)


def test_every_file_that_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_file_that_the_architecture_names_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = {name for name in re.findall(r"`([\w/.]+)`", text) if "/" in name or ".py" in name}
    assert len(named) > 40
    assert [
        one for one in named if not any((ROOT / up / one).exists() for up in ("", "tilenet"))
    ] == []


def test_the_table_of_failures_is_the_one_that_was_measured() -> None:
    text = (ROOT / "docs" / "failures.md").read_text().split("\n## ")[0]
    table = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    launchers = [cell.split()[0] for cell in table[0][1:]]
    shown = {
        (row[0].strip(" `"), launcher, cell.strip())
        for row in table[2:]
        for launcher, cell in zip(launchers, row[1:], strict=True)
    }
    measured = json.loads((ROOT / "bench" / "results" / "failures.json").read_text())
    rows = [row for row in measured["figures"]["rows"] if row["launcher"] in launchers]
    assert shown == {
        (row["fault"], row["launcher"], "{seconds:.1f} s, {exit}".format(**row)) for row in rows
    }


def test_the_table_of_disturbances_is_the_one_that_was_measured() -> None:
    text = (ROOT / "docs" / "failures.md").read_text().split("\n## What a disturbance costs\n")[1]
    lines = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("|")]
    shown = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines[2:]]
    measured = json.loads((ROOT / "bench" / "results" / "survival.json").read_text())
    assert [(row[0], *row[2:]) for row in shown] == [
        (
            row["disturbance"],
            f"{row['seconds']:.0f} s",
            f"{row['state']}, {row['exit']}" if row["resumes"] == "submitted" else "goes on",
            str(row["steps_lost"]),
        )
        for row in measured["figures"]["rows"]
    ]


def test_the_guide_prints_what_the_halo_calculator_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = (ROOT / "docs" / "halo.md").read_text().split("```")
    block = next(b for b in blocks if b.strip().startswith("$ tilenet halo"))
    command, *shown = block.strip().splitlines()
    assert main(command.split()[2:]) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = [line for line in shown if line != "…"]
    assert len(lines) > 5
    assert [line for line in lines if line not in printed] == []


def test_the_guide_prints_what_the_planner_prints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = (ROOT / "docs" / "large-networks.md").read_text().split("```")
    block = next(b for b in blocks if b.strip().startswith("$ tilenet plan"))
    command, *shown = block.strip().splitlines()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(command.split()[2:]) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = [line for line in shown if line != "…"]
    assert len(lines) > 10
    assert [line for line in lines if line not in printed] == []
    assert (tmp_path / "plan.json").exists()
