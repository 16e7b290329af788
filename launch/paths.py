"""Paths that a job reads, looked for while its script is written: a job may wait for hours."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from tilenet.data.lists.image_patterns import is_items, is_pattern
from tilenet.data.rasters.location import is_remote
from tilenet.errors import TilenetError, printable

from .scripts import Job


@dataclass(frozen=True)
class Missing:
    """Paths of a job that do not exist, each after the option or run file that names it.

    Attributes:
        here: Relative paths, from the folder in which the job is submitted and starts.
        elsewhere: Absolute paths, which nodes may see although the login node does not.
    """

    here: tuple[str, ...]
    elsewhere: tuple[str, ...]


def check_paths(job: Job, *, submits: bool) -> list[str]:
    """Return sentences on the paths that a job may not find.

    A script is often written before its files, or submitted from another folder. A job that is
    submitted starts in this one.

    Raises:
        TilenetError: The job is submitted, and something below this folder is missing.
    """
    lacking = missing(job)
    if submits and lacking.here:
        raise TilenetError(
            f"what a job reads must be there when it is submitted ({'; '.join(lacking.here)}); put "
            "it there, name another path, or leave a step out with --run '' or --image ''"
        )
    reasons = {
        "not there yet, where the job is to be submitted from this folder": lacking.here,
        "not seen from here, so the nodes must see it": lacking.elsewhere,
    }
    return [f"{why}: {printable('; '.join(paths))}" for why, paths in reasons.items() if paths]


def missing(job: Job) -> Missing:
    """The paths of a job, relative ones as seen from here, that lead to nothing.

    Not looked for: files that the job writes, copies of files on the nodes, addresses, and names
    that stand for several files.
    """
    named_paths = [("--run", job.run), ("--packed", job.packed)]
    named_paths.append(("--venv", f"{job.venv}/bin/activate" if job.venv else ""))
    rasters = [("--image", job.image), *(("--stage", path) for path in job.stage)]
    rasters += [(f"in {job.run}:", path) for path in _files_of(Path(job.run))]
    named_paths += [(name, path) for name, path in rasters if _is_file(path)]
    lacking = [(name, path) for name, path in named_paths if path and not os.path.exists(path)]
    return Missing(
        here=_listed((name, path) for name, path in lacking if not os.path.isabs(path)),
        elsewhere=_listed((name, path) for name, path in lacking if os.path.isabs(path)),
    )


def _files_of(run: Path) -> list[str]:
    """Images and labels that a run file names; none where it cannot be read, which ranks say."""
    try:
        keys = yaml.safe_load(run.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    values = [keys.get(name) for name in ("images", "labels")] if isinstance(keys, dict) else []
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    return [text for text in texts if isinstance(text, str)]


def _is_file(path: str) -> bool:
    """Whether a name is that of one file or folder that this machine could see."""
    parts = is_items(path) or is_pattern(path) or is_remote(path) or "+" in path
    return not parts and ":" not in path  # ZARR:"scene.zarr":/red


def _listed(named_paths: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """A text for each name, of its first path and how many more there are."""
    of: dict[str, list[str]] = {}
    for name, path in named_paths:
        of.setdefault(name, []).append(path)
    return tuple(
        f"{name} {paths[0]}" + f" and {len(paths) - 1} more" * (len(paths) > 1)
        for name, paths in of.items()
    )
