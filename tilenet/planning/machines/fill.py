"""A dataclass filled with the values of a table of a machine file."""

from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from tilenet.errors import TilenetError
from tilenet.planning.machines.user_file import user_file

__all__ = ["filled"]


T = TypeVar("T")


def filled(kind: type[T], where: str, table: Any, **known: str) -> T:
    """Build a dataclass from a table's values and `known` ones; messages name `where` it stands."""
    remedy = f"correct it in {user_file()}"
    if not isinstance(table, dict):
        raise TilenetError(f"{where} must be a table (got {table!r}); {remedy}")
    kinds, values = get_type_hints(kind, include_extras=True), dict[str, Any](known)
    keys = [part.name for part in fields(kind) if part.name not in known]  # type: ignore[arg-type]
    for key, value in table.items():
        if key not in keys:
            near = get_close_matches(key, keys, n=1, cutoff=0)[0]
            raise TilenetError(f"{where} has no key {key!r} (nearest: {near}); {remedy}")
        if is_dataclass(kinds[key]):
            values[key] = filled(kinds[key], f"{where}.{key}", value)
        elif _fits(value, kinds[key]):
            values[key] = tuple(value) if isinstance(value, list) else value
        else:
            rule = _rule(kinds[key])
            raise TilenetError(f"{where}.{key} must be {rule} (got {value!r}); {remedy}")
    try:
        return kind(**values)
    except TypeError as error:
        missing = str(error).partition(": ")[2]
        raise TilenetError(f"{where} must have all keys (missing: {missing}); {remedy}") from error


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value of a TOML or JSON file is of a type as it stands in a dataclass here."""
    origin, (part, *more) = get_origin(kind), get_args(kind) or (None,)
    if origin is Annotated:
        return _fits(value, part) and all(test(value) for test in more[1::2])
    if origin is Literal:
        return value in (part, *more)
    if origin is tuple:
        return isinstance(value, list) and all(_fits(item, part) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, more[0]) for item in value.values())
    return type(value) in ((int, float) if kind is float else (kind,))


def _rule(kind: Any) -> str:
    """Describe the legal values of a type in words."""
    parts = get_args(kind) or ("true or false", bool)
    return f"one of {', '.join(parts)}" if get_origin(kind) is Literal else parts[-2]
