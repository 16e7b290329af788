"""Checkpoints under partition-free names, written aside and renamed, read without pickle.

A run keeps its checkpoints in `checkpoints/step-00000100` and so on; `last` is a link to the newest
and `best` to that with the best validation. A checkpoint is a folder:

- `weights.safetensors`: keys `<i>.weight`, `<i>.bias`, i the layer's place in the sequence;
- `network.json`: the layers, bands, classes and statistics: all that is needed to make maps;
- `state.safetensors` and `progress.json`: the optimizer's tensors and everything else to resume;
- `checksums.json`: SHA-256 and bytes of these files.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tilenet.errors import TilenetError
from tilenet.storage.atomic import sync
from tilenet.storage.checksums import CHECKSUMS, checksums_text, wrong_file
from tilenet.storage.strict_json import parsed_json

T = TypeVar("T")

WEIGHTS, STATE = "weights.safetensors", "state.safetensors"
NETWORK, PROGRESS = "network.json", "progress.json"
FILES = WEIGHTS, STATE, NETWORK, PROGRESS
STEP = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
# Errors of Python's and torch's readers for numbers and nesting that no checkpoint has.
MALFORMED = (ValueError, TypeError, OverflowError, RecursionError, RuntimeError)


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint.

    Attributes:
        weights: The network's weights, by name.
        network: Values of `network.json`.
        state: The optimizer's tensors, by name.
        progress: Values of `progress.json` besides the step.
    """

    weights: dict[str, Tensor]
    network: dict[str, Any]
    state: dict[str, Tensor] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(
    run: Path, step: int, checkpoint: Checkpoint, keep: int = 2, *, best: bool = False
) -> Path:
    """Write a checkpoint of a run and make it the `last` one, and the `best` one if it is.

    All but the newest `keep` and the `best` one are deleted. At every moment `last` and `best`,
    where they exist, are whole checkpoints: one is on the disk before it is named.

    Raises:
        TilenetError: The disk is full, or the folder cannot be written.
    """
    folder = run / "checkpoints"
    final = _name_of(run, step)
    aside = folder / f".step-{step:08d}.part"
    tensors = {
        name: {k: v.detach().cpu().contiguous() for k, v in values.items()}
        for name, values in ((WEIGHTS, checkpoint.weights), (STATE, checkpoint.state))
    }
    progress = {"step": step, **checkpoint.progress}
    texts = {
        name: json.dumps(value, indent=1) + "\n"
        for name, value in ((NETWORK, checkpoint.network), (PROGRESS, progress))
    }
    try:
        _clear_left(run)
        _write(aside, tensors, texts)
        aside.rename(final)
        sync(folder)
        link(run, "last", final)
        if best:
            link(run, "best", final)
        _delete_old(run, keep)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise TilenetError(
            f"a checkpoint must be writable to its end ({final}: {error}); make room there and "
            f"{run_again(run)}"
        ) from error
    return final


def _write(folder: Path, tensors: dict[str, dict[str, Tensor]], texts: dict[str, str]) -> None:
    """Write a checkpoint's files with their checksums, and have them on the disk.

    Raises:
        OSError, SafetensorError: They cannot be written.
    """
    folder.mkdir(parents=True)
    for name, values in tensors.items():
        save_file(values, folder / name)
    for name, text in texts.items():
        (folder / name).write_text(text)
    files = [folder / name for name in FILES]
    # Before they are synced: of the written bytes, not of bytes that a failing disk gives back.
    (folder / CHECKSUMS).write_text(checksums_text(files))
    for file in (*files, folder / CHECKSUMS):
        # safetensors keeps its files to the owner; the run's other files follow the umask
        file.chmod((folder / NETWORK).stat().st_mode)
        sync(file)
    sync(folder)


def mark_best(run: Path, checkpoint: Path, keep: int = 2) -> None:
    """Make a checkpoint of a run the `best` one.

    Raises:
        TilenetError: The run's folder cannot be written.
    """
    with _writable(run / "best"):
        if not _same(run / "best", checkpoint):
            link(run, "best", checkpoint)
            _delete_old(run, keep)


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[None]:
    """Name a run's folder, or a link in it, in errors of the system on writing there.

    Raises:
        TilenetError: It cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise TilenetError(
            f"a run's folder must be writable ({path}: {error.strerror}); make room there and run "
            "again with --resume"
        ) from error


def saved_checkpoints(run: Path) -> list[Path]:
    """Folders of a run's checkpoints, the newest last; a step that was saved again has several."""
    ordered = ((step_order(path), path) for path in (run / "checkpoints").glob("*"))
    return [path for _, path in sorted((order, path) for order, path in ordered if order)]


def step_order(checkpoint: Path) -> tuple[int, int] | None:
    """Place of a checkpoint among a run's, by its name; None: the name is no checkpoint's."""
    name = STEP.fullmatch(checkpoint.name)
    return (int(name[1]), int(name[2] or 0)) if name else None


def checkpoint_of_step(run: Path, step: int) -> Path | None:
    """A run's checkpoint of a step; the newest, where it was saved again."""
    name = f"step-{step:08d}"
    saved = [path for path in saved_checkpoints(run) if path.name.split(".")[0] == name]
    return saved[-1] if saved else None


def last_step(run: Path) -> int | None:
    """The step of the checkpoint that a run resumes from; None: it has none yet."""
    with contextlib.suppress(OSError):
        order = step_order((run / "last").resolve())
        if order is not None and (run / "last" / CHECKSUMS).is_file():
            return order[0]
    return None


def kept_checkpoint(run: Path) -> str:
    """Words for the end of a sentence: which checkpoint is whole, if there is one."""
    step = last_step(run)
    if step is None:
        return "there is no checkpoint yet"
    return f"the checkpoint of step {step} is whole"


def run_again(run: Path) -> str:
    """Words for the end of a sentence: how to go on with a run."""
    more = "" if last_step(run) is None else " with --resume"
    return f"run again{more}: {kept_checkpoint(run)}"


def link(run: Path, name: str, checkpoint: Path) -> None:
    """Have a link of a run name a checkpoint; at every moment it names the old or the new one.

    Raises:
        OSError: The run's folder cannot be written.
    """
    part = _aside(run, name)
    part.unlink(missing_ok=True)
    part.symlink_to(checkpoint.relative_to(run))
    part.replace(run / name)
    sync(run)  # before its old target is deleted


def _aside(run: Path, name: str) -> Path:
    """Return the path at which a link is made, before it takes its name."""
    return run / f".{name}.part"


def _clear_left(run: Path) -> None:
    """Delete files that a killed run left half written or half deleted."""
    for left in (run / "checkpoints").glob(".step-*.part"):
        shutil.rmtree(left, ignore_errors=True)
    for name in ("last", "best"):
        _aside(run, name).unlink(missing_ok=True)


def set_aside(run: Path, broken: list[Path], whole: Path) -> None:
    """Give broken checkpoints other names, after `last` names the whole one. None is deleted.

    So they neither count among the newest that are kept nor stand in the way of a step's next save.
    Files that a killed run left half written or half deleted go: there may be no next save.

    Raises:
        TilenetError: The run's folder cannot be written.
    """
    with _writable(run):
        if not _same(run / "last", whole):
            link(run, "last", whole)
        for folder in broken:
            if _same(run / "best", folder):
                (run / "best").unlink(missing_ok=True)  # the best of the rest is found again
            if folder.is_dir() and _same(folder.parent, run / "checkpoints"):
                name, again = f"broken-{folder.name}", 0
                while (folder.parent / name).exists():
                    again += 1
                    name = f"broken-{folder.name}.{again}"
                folder.rename(folder.with_name(name))
        _clear_left(run)


def mend_links(run: Path) -> None:
    """Make links again of `last` and `best` that a copy to another disk has made folders.

    Raises:
        TilenetError: The run's folder cannot be written.
    """
    with _writable(run):
        for name in ("last", "best"):
            copy = run / name
            if copy.is_symlink() or not copy.is_dir():
                continue
            same = [path for path in saved_checkpoints(run) if _same_whole(copy, path)]
            if same:
                left = run / "checkpoints" / f".step-{name}.part"
                copy.rename(left)
                shutil.rmtree(left, ignore_errors=True)
            else:  # the link's target was not copied, or one of them is broken: that is said later
                same = [_name_of(run, _step_of(copy))]
                same[0].parent.mkdir(exist_ok=True)
                copy.rename(same[0])
            link(run, name, same[-1])


def _same_whole(checkpoint: Path, other: Path) -> bool:
    """Whether two checkpoints are the same, and both whole."""
    sums = checkpoint / CHECKSUMS, other / CHECKSUMS
    same = all(map(Path.is_file, sums)) and sums[0].read_bytes() == sums[1].read_bytes()
    return same and not any(wrong_file(folder, FILES) for folder in (checkpoint, other))


def _step_of(checkpoint: Path) -> int:
    """The step that a checkpoint is of; a late one where it is so broken that it does not say."""
    try:
        return int(load_json(checkpoint / PROGRESS)["step"])
    except (TilenetError, KeyError, TypeError, ValueError):
        return 10**8 - 1


def _name_of(run: Path, step: int) -> Path:
    """A folder for a checkpoint of a step; the step may have been saved before."""
    orders = [step_order(path) for path in saved_checkpoints(run)]
    again = [order[1] for order in orders if order is not None and order[0] == step]
    # Where all are in order, the newest comes last.
    name = f"step-{step:08d}" + f".{max(again, default=0) + 1}" * bool(again)
    return run / "checkpoints" / name


def _same(path: Path, other: Path) -> bool:
    """Whether two paths lead to the same place, which need not be there."""
    return os.path.realpath(path) == os.path.realpath(other)


def _delete_old(run: Path, keep: int) -> None:
    links = run / "last", run / "best"
    saved = saved_checkpoints(run)
    while saved and os.path.lexists(links[0]) and not _same(saved[-1], links[0]):
        saved.pop()  # a later one, which a run that was killed never came to naming
    for old in saved[:-keep]:
        if not any(_same(old, name) for name in links):
            part = old.with_name(f".{old.name}.part")  # half of one is never called a checkpoint
            old.rename(part)
            shutil.rmtree(part, ignore_errors=True)  # an NFS client may still hold its files


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names: itself, a link to it, or the `last` one of a run.

    Raises:
        TilenetError: The path names no checkpoint.
    """
    with contextlib.suppress(OSError):  # a name too long, a folder that cannot be entered
        for folder in (path, path / "last"):
            if (folder / WEIGHTS).is_file() and (folder / NETWORK).is_file():
                return folder
    raise TilenetError(
        f"a checkpoint is a folder with {WEIGHTS} and {NETWORK}, or a run's folder with last/ "
        f"({path} is neither); name the output folder of a training run"
    )


def load_tensors(path: Path, *, mapped: bool = False) -> dict[str, Tensor]:
    """Read a safetensors file.

    Args:
        mapped: Whether tensors may be views of the file, for callers that copy them at once.

    Raises:
        TilenetError: It is missing or broken.
    """
    # Copied: load_file maps the file, which would then have to outlive the tensors.
    return _read(path, lambda: {n: t if mapped else t.clone() for n, t in load_file(path).items()})


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        TilenetError: It is missing, broken or no object.
    """
    value = _read(path, lambda: parsed_json(path.read_bytes()))
    if not isinstance(value, dict):
        raise TilenetError(f"{path} must hold a JSON object (got {type(value).__name__})")
    return value


def _read(path: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except (OSError, SafetensorError, *MALFORMED) as error:
        raise TilenetError(
            f"a checkpoint's files must be whole ({path}: {error}); use another checkpoint"
        ) from error
