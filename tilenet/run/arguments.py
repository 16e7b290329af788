"""From a run file and options of the command line to a `RunFile`."""

import difflib
import json
import re
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from tilenet.errors import UsageError
from tilenet.planning.plan import read_plan
from tilenet.run.file import RunFile
from tilenet.run.text import check_config

__all__ = ["read_run_file"]


def parser() -> ArgumentParser:
    """The parser of `tilenet train`."""
    made = ArgumentParser(
        prog="tilenet train",
        description="Train a network on images and their labels, over all MPI ranks.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    made.add_argument("-c", "--config", action="config", help="run file (YAML)")
    made.add_argument(
        "--resume", action="store_true", help="go on from output/last, where it exists"
    )
    made.add_argument(
        "--overwrite", action="store_true", help="begin anew where output holds a run"
    )
    made.add_argument(
        "--accept-gaps",
        action="store_true",
        help="resume although rows of history.csv are missing",
    )
    made.add_class_arguments(RunFile)
    return made


def read_run_file(arguments: list[str]) -> tuple[RunFile, Namespace]:
    """Parse the arguments of `tilenet train`.

    Returns:
        The run, and the namespace it was made of (with `resume`, `overwrite`, `accept_gaps`).

    Raises:
        UsageError: A key is unknown or missing, or a value has the wrong type.
        TilenetError: The values contradict each other.
    """
    made = parser()
    namespace = _parse(made, arguments)
    if namespace.plan is not None:
        # First, so that what the run file and the command line say has the last word.
        keys = json.dumps(read_plan(Path(namespace.plan)).keys)
        namespace = _parse(made, ["--config", keys, *arguments])
    for part in fields(RunFile):
        if _is_group(part) and not isinstance(namespace[part.name], Namespace):
            raise UsageError(
                f"{part.name} is a group of keys ({part.name}: {namespace[part.name]}); write keys "
                "under it, or leave it out"
            )
    parts = made.instantiate(namespace)
    return RunFile(**{part.name: parts[part.name] for part in fields(RunFile)}), namespace


def _parse(made: ArgumentParser, arguments: list[str]) -> Namespace:
    check_config(arguments, [part.name for part in fields(RunFile) if _is_group(part)])
    try:
        return made.parse_args(arguments)
    except Exception as error:  # jsonargparse raises several kinds; all speak of the user's input
        raise UsageError(_explain(" ".join(str(error).split()))) from None


def _is_group(part: "Field[Any]") -> bool:
    return is_dataclass(part.default_factory)


def _explain(message: str) -> str:
    """jsonargparse's words, with the nearest known key where a key is unknown."""
    found = re.search(r"(?:Group '([\w.]+)' does not accept o|O)ption '([\w.]+)'", message)
    found = found or re.search(r"unrecognized arguments:()\s*--([\w.]+)", message)
    if not found:
        return message
    unknown = f"{found[1]}.{found[2]}" if found[1] else found[2]
    near = difflib.get_close_matches(unknown, _names(RunFile), n=1, cutoff=0)
    return f"{message.rstrip('.')} (unknown key {unknown}; the nearest known key is {near[0]})"


def _names(kind: Any, prefix: str = "") -> list[str]:
    """Dotted names of all keys."""
    names = []
    for part in fields(kind):
        names.append(prefix + part.name)
        if is_dataclass(part.default_factory):
            names.extend(_names(part.default_factory, f"{prefix}{part.name}."))
    return names
