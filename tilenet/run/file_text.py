"""A run as the text of a run file that gives the same run."""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any

from tilenet.run.file import RunFile

__all__ = ["flow_text", "run_file_text"]


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
            yield f"{indent}{part.name}: {flow_text(value)}"


def flow_text(value: Any) -> str:
    """A value in one line: JSON, which is YAML too, but for keys and numbers that it lacks."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow_text(k)}: {flow_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow_text, value)) + "]"
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
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    """As JSON, but that YAML would read JSON's escapes of letters beyond 16 bits as two letters."""
    return '"' + "".join(map(_letter, text)) + '"'


def _letter(letter: str) -> str:
    if letter.isprintable() and letter not in '"\\':
        return letter
    return json.dumps(letter)[1:-1] if ord(letter) < 1 << 16 else f"\\U{ord(letter):08x}"


# What YAML would not take for texts.
WORDS = {w for word in ("y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "nan",
                        "inf") for w in (word, word.capitalize(), word.upper())}  # fmt: skip
