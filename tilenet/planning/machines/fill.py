"""A dataclass filled with the values of a table of a machine file or a plan."""

from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

WORDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "null"
}  # fmt: skip

T = TypeVar("T")


def filled(kind: type[T], where: str, table: Any, **known: Any) -> T:
    """Build a dataclass from a table's values and `known` ones; messages name `where` it stands.

    Raises:
        ValueError: A key is missing, unknown, or its value of another type; it says which.
    """
    if not isinstance(table, dict):
        raise ValueError(f"{where} must be a table (got {table!r})")
    kinds, values = get_type_hints(kind, include_extras=True), dict(known)
    keys = [part.name for part in fields(kind) if part.name not in known]  # type: ignore[arg-type]
    for key, value in table.items():
        if key not in keys:
            near = get_close_matches(key, keys, n=1, cutoff=0)[0]
            raise ValueError(f"{where} has no key {key!r} (nearest: {near})")
        if is_dataclass(kinds[key]):
            values[key] = filled(kinds[key], f"{where}.{key}", value)
        elif _fits(value, kinds[key]):
            values[key] = tuple(value) if isinstance(value, list) else value
        else:
            raise ValueError(f"{where}.{key} must be {_rule(kinds[key])} (got {value!r})")
    try:
        return kind(**values)
    except TypeError as error:
        missing = str(error).partition(": ")[2]
        raise ValueError(f"{where} must have all keys (missing: {missing})") from error


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value of a TOML or JSON file is of a type as it stands in a dataclass here."""
    origin, (part, *more) = get_origin(kind), get_args(kind) or (None,)
    if origin is Annotated:
        return _fits(value, part) and all(test(value) for test in more[1::2])
    if origin is Literal:
        return value in (part, *more)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in (part, *more))
    if origin is tuple:
        return isinstance(value, list) and all(_fits(item, part) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, more[0]) for item in value.values())
    return type(value) in ((int, float) if kind is float else (kind,))


def _rule(kind: Any) -> str:
    """Describe the legal values of a type in words."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(parts)}"
    if origin in (Union, UnionType):
        return " or ".join(map(_rule, parts))
    return parts[-2] if origin is Annotated else WORDS.get(kind, str(kind))
