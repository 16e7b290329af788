"""Look at the text of a run file before it is parsed.

The parser walks into lists and groups by recursion in C, which ends the process where they are
nested deeply, and unfolds aliases (`*name`), of which ten lines may stand for a billion values. The
scan here does neither: it reads the text's marks one after another.
"""

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import jsonargparse
import yaml

from tilenet.errors import UsageError
from tilenet.files.plain_file import read_plain, refuse_special

__all__ = ["check_config", "check_text"]

MOST_BYTES = 4 << 20
MOST_DEPTH = 16
MOST_VALUES = 20_000  # aliases counted as what they stand for


def check_config(arguments: Sequence[str], groups: Sequence[str]) -> None:
    """Look at what the command line names or holds: run files, and values of options.

    Args:
        groups: Names of groups of keys. Their value is no file, although the parser would read one.

    Raises:
        UsageError: A run file is no file, cannot be read or is too large, or a text is nested or
            unfolds too much.
    """
    before = ""
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if not (option.startswith("-") and equals):
            option, value = before, argument
        before = argument
        _check_letters(option, value)
        if option in ("-c", "--config"):
            value = _text_of(value)
        elif option.removeprefix("--") in groups and not value.lstrip().startswith("{"):
            raise UsageError(
                f"{option} is a group of keys ({option}: {value}); set them one by one, as in "
                f"{option}.KEY VALUE"
            )
        check_text(value)
        _check_once(value)
        if option in ("-c", "--config"):
            _check_keys(value, groups)


def _check_letters(option: str, value: str) -> None:
    """Refuse bytes that are no UTF-8, which Python keeps as lone surrogates."""
    if value != value.encode(errors="replace").decode():
        raise UsageError(
            f"words of the command line are UTF-8 ({option}: {value!r}); rename the file, or write "
            "the word in a terminal that writes UTF-8"
        )


def check_text(text: str) -> None:
    """Refuse a text of YAML that is nested or unfolds too much, or holds NUL; broken ones pass.

    Raises:
        UsageError: With the limit.
    """
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []
    total = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.AliasEvent):
                total += sizes.get(event.anchor, 1)
            elif isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, total))
                total += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = open_nodes.pop()
                if anchor is not None:
                    sizes[anchor] = total - before
            elif isinstance(event, yaml.ScalarEvent):
                total += 1
                if "\0" in event.value:
                    raise UsageError(
                        f"no text of a run file holds a NUL byte (got {event.value!r}); write it "
                        "anew"
                    )
            if len(open_nodes) > MOST_DEPTH or total > MOST_VALUES:
                raise UsageError(
                    f"a run file holds at most {MOST_VALUES} values, {MOST_DEPTH} levels deep "
                    f"(got {'more levels' if len(open_nodes) > MOST_DEPTH else 'more values'}); "
                    "name many images by a pattern, or in a CSV file"
                )
    except (yaml.YAMLError, ValueError):
        return  # the parser says what is wrong


def _check_once(text: str) -> None:
    """Refuse a key that stands twice, of which the last would win; broken texts pass.

    `network.base: 4` is a key of the group `network` too.

    Raises:
        UsageError: With the key and its lines.
    """
    try:
        waiting: deque[tuple[Any, str, dict[tuple[str, str], int]]] = deque(
            [(yaml.compose(text, Loader=_Loader), "", {})]
        )
    except (yaml.YAMLError, ValueError):
        return  # the parser says what is wrong
    seen: set[int] = set()
    while waiting:
        node, group, lines = waiting.popleft()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += [(value, "", {}) for value in node.value]
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                name, line = f"{group}{key.value}", key.start_mark.line + 1
                if (name, key.tag) in lines:
                    first, second = sorted((lines[name, key.tag], line))
                    raise UsageError(
                        f"a key stands once in a run file ({name} in lines {first} and {second}); "
                        "delete one of them"
                    )
                lines[name, key.tag] = line
                waiting.append((value, f"{name}.", lines))


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _text_of(value: str) -> str:
    """The text of a run file; the value itself where it is one."""
    try:
        refuse_special(value)
        if not os.path.isfile(value):
            return value
        text = read_plain(value, MOST_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"a run file is UTF-8 text ({value}: byte {error.start} is none); save it as UTF-8"
        ) from error
    except ValueError:
        return value  # the parser says what is wrong
    except OSError as error:
        raise UsageError(
            f"a run file must be a file that can be read ({value}: {error.strerror}); name another"
        ) from error
    if not text.strip():
        raise UsageError(f"a run file holds keys and values ({value} is empty); name another")
    return text


def _check_keys(text: str, groups: Sequence[str]) -> None:
    """Refuse run files that name other files where keys belong."""
    try:
        keys = jsonargparse.get_loader("yaml")(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return
    for name in ("config", *groups):
        if isinstance(keys, dict) and isinstance(keys.get(name), str):
            raise UsageError(
                f"a run file names no other ones ({name}: {keys[name]}); write the keys themselves"
            )
