"""Traces in Chrome's format, as torch's profiler writes them: read, and packed.

Perfetto (ui.perfetto.dev) and chrome://tracing show them.
"""

import gzip
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilenet.errors import TilenetError

__all__ = ["TraceEvent", "pack_trace", "read_trace"]


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that took time.

    Attributes:
        kind: `kernel`, `gpu_memcpy`, `cpu_op`, `user_annotation` and more.
        name: Of the operator, the kernel, the direction of the copy or the mark.
        start: In seconds since some time that all events of a trace share.
        stop: Likewise.
        device: Number of the GPU; None: not on one.
        num_bytes: Copied; None: not a copy, or not known.
    """

    kind: str
    name: str
    start: float
    stop: float
    device: int | None = None
    num_bytes: int | None = None


def read_trace(path: Path) -> list[TraceEvent]:
    """The events of a trace that take time, in the file's order.

    Raises:
        TilenetError: The file is not whole.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            # Each event shrinks as soon as it is read: as dicts they would take several times the
            # file's size.
            found = json.load(file, object_hook=_shrunk)
        events = found["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TilenetError(
            f"a trace must be a whole JSON file with traceEvents ({path}: {error}); record it "
            "again, with room on the disk"
        ) from error
    return [event for event in events if isinstance(event, TraceEvent)]


def pack_trace(path: Path, target: Path) -> None:
    """Compress a trace; the target is whole or not there.

    Raises:
        OSError: It cannot be written.
    """
    part = target.with_name(f"{target.name}.part")
    try:
        with path.open("rb") as file, gzip.open(part, "wb", compresslevel=6) as packed:
            shutil.copyfileobj(file, packed)
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _shrunk(found: dict[str, Any]) -> Any:
    """An event that takes time as such, other events as None, other objects as they are."""
    if "ph" not in found:
        return found
    if found["ph"] != "X" or "cat" not in found:
        return None
    facts, start = found.get("args", {}), float(found["ts"])
    return TraceEvent(
        kind=found["cat"],
        name=str(found["name"]),
        start=start / 1e6,
        stop=(start + float(found.get("dur", 0))) / 1e6,
        device=facts.get("device"),
        num_bytes=facts.get("bytes"),
    )
