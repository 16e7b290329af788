"""Broken input: values that no file should hold, and ways to put them into good files."""

import copy
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tilenet.errors import TilenetError

MOST_SECONDS = 30

VALUES: list[Any] = [
    *(None, True, False, "", "x", [], {}, [[]], [None], {"a": 1}, 0, -1, 1, 0.5, -0.0, 1e308),
    *(2**31, 10**30, 10**400, float("nan"), float("inf"), "a\nb", "\ud800", "²", [0] * 3000),
]
# Folders and files are the same for all examples of a test.
few = settings(
    suppress_health_check=list(HealthCheck), max_examples=int(os.environ.get("FUZZ_EXAMPLES", "30"))
)
values = st.sampled_from(VALUES) | st.integers() | st.floats() | st.text(max_size=9)


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """All holders of a tree of lists and dictionaries, with each of their keys."""
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree))
    for key in list(keys):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from places(tree[key])


@st.composite
def spoilt(draw: st.DrawFn, good: Any) -> Any:
    """A tree of which one to three values are replaced, lost, repeated or moved."""
    tree = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(tree))
        if not found:
            return tree
        holder, key = draw(st.sampled_from(found))
        match draw(st.sampled_from(["replace", "replace", "lose", "repeat", "move", "add"])):
            case "replace":
                holder[key] = copy.deepcopy(draw(values))
            case "lose":
                del holder[key]
            case "repeat":
                holder[key] = [copy.deepcopy(holder[key])] * draw(st.sampled_from([2, 500]))
            case "move":
                other, place = draw(st.sampled_from(found))
                holder[key] = copy.deepcopy(other.get(place) if isinstance(other, dict) else None)
            case "add" if isinstance(holder, dict):
                holder[draw(st.text(max_size=9))] = copy.deepcopy(draw(values))
    return tree


@st.composite
def noisy(draw: st.DrawFn, good: bytes) -> bytes:
    """Bytes of which some are changed, cut off, lost or repeated; the first ones more often."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 6))):
        last = max(0, len(data) - 1)
        place = draw(st.integers(0, last) | st.integers(0, min(last, 600)))
        match draw(st.sampled_from(["byte", "byte", "word", "cut", "lose", "repeat"])):
            case "byte" if data:
                data[place] = draw(st.integers(0, 255))
            case "word":
                word = draw(st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 65535]))
                data[place : place + 4] = word.to_bytes(4, "little")
            case "cut":
                del data[place:]
            case "lose":
                del data[place : place + draw(st.integers(1, 40))]
            case "repeat":
                data[place:place] = data[place : place + 40] * draw(st.sampled_from([1, 30]))
    return bytes(data)


def late(signum: int, frame: Any) -> None:
    raise TimeoutError(f"took more than {MOST_SECONDS} s")


def said(action: Callable[[], Any]) -> str | None:
    """The sentence with which input is refused; None: it passed. Anything else is raised."""
    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(MOST_SECONDS)
    try:
        action()
    except TilenetError as error:
        return str(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    return None


def written(folder: Path, name: str, data: bytes | str | Any) -> Path:
    path = folder / name
    if not isinstance(data, bytes | str):
        data = json.dumps(data)
    path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
    return path
