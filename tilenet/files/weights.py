"""Checkpoints under partition-free names, written aside and renamed, read without pickle.

A run keeps its checkpoints in `checkpoints/step-00000100` and so on, and `last` is a link to the
newest. A checkpoint is a folder:

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

__all__ = ["find_checkpoint", "load_json", "load_tensors", "save_checkpoint"]

T = TypeVar("T")


def save_checkpoint(
    run: Path,
    step: int,
    weights: dict[str, Tensor],
    network: dict[str, Any],
    state: dict[str, Tensor],
    progress: dict[str, Any],
    keep: int = 2,
) -> Path:
    """Write a checkpoint of a run and make it the `last` one; older ones than `keep` are deleted.

    At every moment `last`, where it exists, is a whole checkpoint.

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
        link = run / ".last.part"
        link.unlink(missing_ok=True)
        link.symlink_to(final.relative_to(run))
        link.replace(run / "last")
        for old in sorted(folder.glob("step-*"))[:-keep]:
            if old != final:
                shutil.rmtree(old, ignore_errors=True)  # an NFS client may still hold its files
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise TilenetError(
            f"a checkpoint must be writable to its end ({final}: {error}); make room there and run "
            "again with --resume: the checkpoint before it is whole"
        ) from error
    return final


WEIGHTS, STATE = "weights.safetensors", "state.safetensors"
NETWORK, PROGRESS = "network.json", "progress.json"


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names: itself, or the `last` one of a run.

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
    value = _read(path, lambda: json.loads(path.read_text()))
    if not isinstance(value, dict):
        raise TilenetError(f"{path} must hold a JSON object (got {type(value).__name__})")
    return value


def _read(path: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
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
