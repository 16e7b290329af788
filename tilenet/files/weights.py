"""Checkpoints under partition-free names, written aside and renamed, read without pickle.

A run keeps its checkpoints in `checkpoints/step-00000100` and so on; `last` is a link to the newest
and `best` to that with the best validation. A checkpoint is a folder:

- `weights.safetensors`: keys `<i>.weight`, `<i>.bias`, i the layer's place in the sequence;
- `network.json`: the layers, bands, classes and statistics: all that is needed to make maps;
- `state.safetensors` and `progress.json`: the optimizer's tensors and everything else to resume.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tilenet.errors import TilenetError
from tilenet.files.plain_file import read_plain, refuse_special

__all__ = [
    "checkpoint_of_step",
    "find_checkpoint",
    "load_json",
    "load_tensors",
    "mark_best",
    "save_checkpoint",
]

T = TypeVar("T")

MOST_JSON_BYTES = 64 << 20
# What Python's and torch's readers raise for numbers and nests that no checkpoint has.
NONSENSE = (ValueError, TypeError, OverflowError, RecursionError, RuntimeError)


def save_checkpoint(
    run: Path,
    step: int,
    weights: dict[str, Tensor],
    network: dict[str, Any],
    state: dict[str, Tensor],
    progress: dict[str, Any],
    keep: int = 2,
    *,
    best: bool = False,
) -> Path:
    """Write a checkpoint of a run and make it the `last` one, and the `best` one if it is.

    All but the newest `keep` and the `best` one are deleted. At every moment `last` and `best`,
    where they exist, are whole checkpoints.

    Raises:
        TilenetError: The disk is full, or the folder cannot be written.
    """
    folder = run / "checkpoints"
    final = folder / f"step-{step:08d}"
    aside = folder / f".step-{step:08d}.part"
    try:
        shutil.rmtree(aside, ignore_errors=True)  # a killed run's
        aside.mkdir(parents=True)
        save_file({k: v.detach().cpu().contiguous() for k, v in weights.items()}, aside / WEIGHTS)
        save_file({k: v.detach().cpu().contiguous() for k, v in state.items()}, aside / STATE)
        (aside / NETWORK).write_text(json.dumps(network, indent=1) + "\n")
        (aside / PROGRESS).write_text(json.dumps(progress, indent=1) + "\n")
        for file in aside.iterdir():
            # safetensors keeps its files to the owner; the run's other files follow the umask
            file.chmod((aside / NETWORK).stat().st_mode)
            _sync(file)
        again = 0
        while final.exists():  # the step was saved before, and `last` may be that checkpoint
            again += 1
            final = folder / f"step-{step:08d}.{again}"
        aside.rename(final)
        _sync(folder)
        _link(run, "last", final)
        if best:
            _link(run, "best", final)
        _delete_old(run, keep)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise TilenetError(
            f"a checkpoint must be writable to its end ({final}: {error}); make room there and run "
            "again with --resume: the checkpoint before it is whole"
        ) from error
    return final


def mark_best(run: Path, checkpoint: Path, keep: int = 2) -> None:
    """Make a checkpoint of a run the `best` one.

    Raises:
        TilenetError: The run's folder cannot be written.
    """
    try:
        if (run / "best").resolve() != checkpoint.resolve():
            _link(run, "best", checkpoint)
            _delete_old(run, keep)
    except OSError as error:
        raise TilenetError(
            f"a run's folder must be writable ({run / 'best'}: {error.strerror}); make room there "
            "and run again with --resume"
        ) from error


def checkpoint_of_step(run: Path, step: int) -> Path | None:
    """A run's checkpoint of a step; the newest, where it was saved again."""
    folder, name = run / "checkpoints", f"step-{step:08d}"
    found = [*folder.glob(name), *sorted(folder.glob(f"{name}.*"))]
    return found[-1] if found else None


def _link(run: Path, name: str, checkpoint: Path) -> None:
    link = run / f".{name}.part"
    link.unlink(missing_ok=True)
    link.symlink_to(checkpoint.relative_to(run))
    link.replace(run / name)


def _delete_old(run: Path, keep: int) -> None:
    linked = [(run / name).resolve() for name in ("last", "best")]
    for old in sorted((run / "checkpoints").glob("step-*"))[:-keep]:
        if old.resolve() not in linked:
            shutil.rmtree(old, ignore_errors=True)  # an NFS client may still hold its files


WEIGHTS, STATE = "weights.safetensors", "state.safetensors"
NETWORK, PROGRESS = "network.json", "progress.json"


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names: itself, a link to it, or the `last` one of a run.

    Raises:
        TilenetError: There is none.
    """
    with contextlib.suppress(OSError):  # a name too long, a folder that cannot be entered
        for folder in (path, path / "last"):
            if (folder / WEIGHTS).is_file() and (folder / NETWORK).is_file():
                return folder
    raise TilenetError(
        f"a checkpoint is a folder with {WEIGHTS} and {NETWORK}, or a run's folder with last/ "
        f"({path} is neither); name the output folder of a training run"
    )


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises:
        TilenetError: It is missing or broken.
    """
    # Copied: load_file maps the file, which would then have to outlive the tensors.
    return _read(path, lambda: {name: t.clone() for name, t in load_file(path).items()})


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        TilenetError: It is missing, broken or no object.
    """
    value = _read(path, lambda: json.loads(read_plain(path, MOST_JSON_BYTES)))
    if not isinstance(value, dict):
        raise TilenetError(f"{path} must hold a JSON object (got {type(value).__name__})")
    return value


def _read(path: Path, read: Callable[[], T]) -> T:
    try:
        refuse_special(path)
        return read()
    except (OSError, SafetensorError, *NONSENSE) as error:
        raise TilenetError(
            f"a checkpoint's files must be whole ({path}: {error}); use another checkpoint"
        ) from error


def _sync(path: Path) -> None:
    """Have the disk hold what the file or folder says, so that a rename never precedes it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
