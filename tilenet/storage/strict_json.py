"""JSON with each key of an object once: Python's reader takes the last of several silently."""

import json
from typing import Any


def parsed_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: It is no JSON, or an object has a key twice.
        RecursionError: It is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands {names.count(twice)} times in one object")
    return value
