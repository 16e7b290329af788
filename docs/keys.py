"""Write the table of keys in docs/run-file.md from the fields of the run file and their docstrings.

    python docs/keys.py

A docstring may end with `Default: …`, where the field's own default does not say enough.
"""

import ast
import inspect
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from tilenet.training.config.run_file import RunFile

__all__ = ["PAGE", "table", "with_table"]

PAGE = Path(__file__).with_name("run-file.md")
HEAD = "| key | default | meaning |\n|---|---|---|\n"


def table(kind: Any, prefix: str = "") -> str:
    """Rows of the keys of a dataclass, those of its groups too."""
    said, rows = _docstrings(kind), []
    for key in fields(kind):
        name = prefix + key.name
        if is_dataclass(key.default_factory):
            rows.append(table(key.default_factory, f"{name}."))
            continue
        meaning, _, default = said[key.name].partition(" Default: ")
        if default:
            meaning, default = meaning.removesuffix("."), default.removesuffix(".")
        else:
            default = _shown(key.default)
        rows.append(f"| `{name}` | {default} | {meaning} |\n")
    return "".join(rows)


def _shown(default: Any) -> str:
    if default is MISSING:
        return "required"
    if default is None:
        return "–"
    if isinstance(default, bool):
        return str(default).lower()
    return f"`{default}`" if isinstance(default, str) else f"{default:g}"


def _docstrings(kind: Any) -> dict[str, str]:
    """What stands below each field, in one line."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return found


def with_table(page: str) -> str:
    """The page with a new table."""
    before, rest = page.split(HEAD, 1)
    return before + HEAD + table(RunFile) + "\n" + rest.split("\n\n", 1)[1]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
