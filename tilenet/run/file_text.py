"""A run as the text of a run file that gives the same run."""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any

from tilenet.run.file import RunFile

__all__ = ["run_file_text"]


def run_file_text(run: RunFile) -> str:
    """YAML with every key that has a value, defaults too: they may be others in later versions.

    Not by a YAML library: what jsonargparse has for it takes longer than a small run.
    """
    return "\n".join(_lines(run, ""))


def _lines(keys: Any, indent: str) -> Iterator[str]:
    for part in fields(keys):
        value = getattr(keys, part.name)
        if is_dataclass(value):
            inner = list(_lines(value, indent + "  "))
            if inner:
                yield f"{indent}{part.name}:"
                yield from inner
        elif value is not None:
            yield f"{indent}{part.name}: {_flow(value)}"


def _flow(value: Any) -> str:
    """A value in one line: JSON, which is YAML too, but for keys and numbers that it lacks."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, float):
        if not isfinite(value):
            return ".nan" if value != value else (".inf" if value > 0 else "-.inf")
        digits, _, exponent = repr(value).partition("e")
        if not exponent:
            return digits
        # YAML takes 1e-05 for a text.
        return f"{digits}e{exponent}" if "." in digits else f"{digits}.0e{exponent}"
    if isinstance(value, str) and value.isidentifier() and value not in WORDS:
        return value
    return json.dumps(value, ensure_ascii=True)


# What YAML would not take for texts.
WORDS = {w for word in ("y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "nan",
                        "inf") for w in (word, word.capitalize(), word.upper())}  # fmt: skip
