"""A run's folder: its checkpoints, and how a run continues from them."""

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilenet.errors import TilenetError
from tilenet.model.average import WeightAverage
from tilenet.model.loss_scale import LossScale
from tilenet.model.network import Network, load_weights
from tilenet.mpi import Intracomm
from tilenet.parallel.health.progress import say
from tilenet.parallel.health.watchdog import SLOW, Watchdog
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.sums.shares import Shares
from tilenet.storage import tensorboard
from tilenet.storage.atomic import check_name
from tilenet.storage.checkpoints import (
    Checkpoint,
    checkpoint_of_step,
    find_checkpoint,
    load_json,
    load_tensors,
    mark_best,
    mend_links,
    save_checkpoint,
    set_aside,
)
from tilenet.storage.lock import Lock
from tilenet.storage.network_json import NetworkRecord
from tilenet.storage.whole_checkpoint import BrokenCheckpoint, checked_checkpoint, newest_whole
from tilenet.training.folder.background_save import BackgroundSave, host_copies, in_background
from tilenet.training.folder.files import RUN_FILES, TABLES
from tilenet.training.states import fill_optimizer

# Terms that checkpoints of earlier versions do not hold.
LATER_TERMS = (
    "nodata", "resolution", "ignore_index", "vectors.", "network.", "folders", "validation.score"
)  # fmt: skip

BEGINNING = ".beginning.part"  # is there while files of an earlier run are deleted


class RunFolder:
    """The folder named `output` in the run file.

    Args:
        path: Path of the folder.
        write: Whether this rank writes; the others only read.
        terms: Values that a resumed run must not change, by their names in the run file.
        keep: Number of newest checkpoints that are kept.
    """

    def __init__(
        self,
        path: Path,
        *,
        write: bool,
        terms: dict[str, Any] | None = None,
        keep: int = 2,
    ) -> None:
        self.path = path
        self._terms, self._keep = terms or {}, keep
        self._write = write
        self._resumed: Path | None = None
        self._broken: tuple[BrokenCheckpoint, ...] = ()
        self._saving = BackgroundSave()
        self._lock: Lock | None = None

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run resumes from a checkpoint."""
        return self._resumed is not None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def open(self, comm: Intracomm, watchdog: Watchdog, *, resume: bool, overwrite: bool) -> None:
        """Make the folder, lock it, and agree on the checkpoint to resume from. Collective.

        Raises:
            AgreedError: See `prepare`.
        """
        # One rank verifies the checksums of checkpoints, and the others wait.
        watchdog.arm("the look into the run's folder", SLOW)
        with agreed(comm):
            checkpoint = self.prepare(resume=resume, overwrite=overwrite)
        self._resumed = comm.bcast(checkpoint)
        for broken in self._broken:
            say(f"{broken.path} is broken ({broken.wrong}): the run goes on from {self._resumed}")

    def prepare(self, *, resume: bool, overwrite: bool) -> Path | None:
        """Make the folder, lock it, and decide whether to begin or to resume. Deletes nothing.

        Returns:
            On the rank that writes, the checkpoint to resume from: only that rank verifies them.

        Raises:
            TilenetError: Another job writes to the folder, it holds a run and neither `resume` nor
                `overwrite` is set, it cannot be written, or no checkpoint is intact.
        """
        check_name("output", self.path)
        if not self._write:
            return None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable.part"
            probe.touch()
            probe.unlink()
            self._lock = Lock(self.path / ".lock", f"the run's folder {self.path}")
            holds_run = (self.path / TABLES[0]).exists() or os.path.lexists(self.path / "last")
        except OSError as error:
            raise TilenetError(
                f"output must be a folder that can be written ({self.path}: {error.strerror}); "
                "choose another one"
            ) from error
        if holds_run and not (resume or overwrite):
            raise TilenetError(
                f"a run is not overwritten unasked ({self.path} holds one); add --resume to go on "
                "with it, --overwrite to start over, or name another output"
            )
        if not resume or (self.path / BEGINNING).exists():
            return None
        mend_links(self.path)
        newest = newest_whole(self.path)
        self._broken = newest.broken
        return newest.checkpoint

    def begin(self, *, scalars: bool = False) -> None:
        """Delete the files of an earlier run; call it once the new run cannot be refused any more.

        A resumed run deletes only partial files of a job that was killed. Broken checkpoints are
        kept under other names.

        Args:
            scalars: Whether the run writes scalars for TensorBoard.

        Raises:
            TilenetError: The folder cannot be written, or a package is missing for the scalars.
        """
        if not self._write:
            return
        if scalars:
            tensorboard.check_package()
        if self._resumed is not None:
            set_aside(self.path, [broken.folder for broken in self._broken], self._resumed)
        try:
            for name in RUN_FILES:
                for part in (f"{name}.part", f".{name}.part"):
                    (self.path / part).unlink(missing_ok=True)
            if self._resumed is not None:
                return
            # A run that is killed from here on begins once more, with --resume too.
            (self.path / BEGINNING).touch()
            for name in ("checkpoints", tensorboard.FOLDER):
                _empty(self.path / name)
            for name in ("last", "best", *RUN_FILES):
                _delete(self.path / name)
            (self.path / BEGINNING).unlink()
        except OSError as error:
            raise TilenetError(
                f"an earlier run must be deletable ({self.path}: {error.strerror}); delete it "
                "yourself or choose another output"
            ) from error

    def record(
        self, planned: NetworkRecord, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> NetworkRecord:
        """The network's record, with the given statistics, or those of the checkpoint.

        Raises:
            TilenetError: The checkpoint is of another network.
        """
        if self._resumed is None:
            return replace(planned, mean=mean, std=std)
        saved = NetworkRecord.from_json(load_json(self._resumed / "network.json"))
        if not saved.same_network(planned) or saved.wanted_bands != planned.wanted_bands:
            raise TilenetError(
                f"a run goes on with the network that it began with ({self._resumed} has "
                f"{len(saved.layers)} layers and bands {list(saved.wanted_bands)}, the run file "
                f"says {len(planned.layers)} and {list(planned.wanted_bands)}, or their options "
                "differ); restore the run file or start over with --overwrite"
            )
        if saved.classes != planned.classes:
            raise TilenetError(
                f"a run goes on with the classes that it began with ({', '.join(saved.classes)} in "
                f"{self._resumed}, {', '.join(planned.classes)} in the run file), of which its "
                "tables have columns; restore the run file or start over with --overwrite"
            )
        if saved.names != planned.names:
            old, new = saved.names or {}, planned.names or {}
            own = next(own for own in {**new, **old} if old.get(own) != new.get(own))
            raise TilenetError(
                f"a run goes on with the names of weights that it began with ({own}: "
                f"{old.get(own)} in {self._resumed}, {new.get(own)} in the module); give the "
                "module's parts the names that they had, or start over with --overwrite"
            )
        return replace(planned, mean=saved.mean, std=saved.std)

    def load(
        self,
        network: Network,
        optimizer: torch.optim.Optimizer,
        scale: LossScale,
        init: str | None,
        names: Mapping[str, str] | None = None,
        shares: Shares | None = None,
        average: WeightAverage | None = None,
    ) -> int:
        """Load weights, optimizer state and loss scale; return the number of steps already made.

        Args:
            init: First weights of a run that does not resume: a file or a run's folder.
            names: Names of the weights in checkpoints (see `load_weights`).
            shares: See `fill_optimizer`.
            average: Average of the weights, which begins or is loaded too.

        Raises:
            TilenetError: Files are missing or do not fit the network.
        """
        if self._resumed is None:
            if init is not None:
                path = Path(init)
                if path.is_dir():
                    find = checked_checkpoint if self._write else find_checkpoint
                    path = find(path) / "weights.safetensors"
                load_weights(network, load_tensors(path), str(path), names)
            if average is not None:
                average.begin()
            return 0
        progress = load_json(self._resumed / "progress.json")
        for name, value in self._terms.items():
            if name not in progress and name.startswith(LATER_TERMS):
                continue
            if progress.get(name) != value:
                raise TilenetError(
                    f"a run goes on as it began ({name} of {self._resumed}: {progress.get(name)}, "
                    f"of the run file: {value}); restore the run file, or start over with "
                    "--overwrite, perhaps with init"
                )
        path = self._resumed / "weights.safetensors"
        load_weights(network, load_tensors(path), str(path), names)
        state = load_tensors(self._resumed / "state.safetensors", mapped=True)
        if average is not None:
            average.resume(state, str(self._resumed))
        fill_optimizer(network, optimizer, state, str(self._resumed), shares)
        step = progress.get("step")
        if type(step) is not int or not 0 <= step < 2**53:
            raise TilenetError(
                f"progress.json must hold the number of steps (step: {step!r}); use another "
                "checkpoint"
            )
        if scale.most > 1:
            scale.restore(progress.get("loss_scale"), progress.get("calm_steps"))
        return step

    def save(
        self,
        step: int,
        network: Network,
        weights: dict[str, Tensor],
        record: NetworkRecord,
        state: dict[str, Tensor],
        scale: LossScale,
        *,
        best: bool = False,
    ) -> None:
        """Write a checkpoint, on the rank that writes.

        For a network on GPUs a thread writes a copy while training goes on, and its error is raised
        by the next save or `wait`. On CPUs the thread would slow the steps down by as much time as
        it saves.

        Args:
            weights: The network's weights, under their names in the checkpoint.
            state: The optimizer's states, from `optimizer_tensors`.
            best: Whether this is the best validation so far.

        Raises:
            TilenetError: This or the previous checkpoint could not be written, or another job has
                taken over the folder.
        """
        if not self._write:
            return
        self.wait()
        progress = dict(self._terms)
        if scale.most > 1:
            progress |= {"loss_scale": scale.value, "calm_steps": scale.calm_steps}
        save = partial(save_checkpoint, self.path, step, keep=self._keep, best=best)
        content = Checkpoint(weights, record.to_json(), state, progress)
        if any(in_background(parameter) for parameter in network.parameters()):
            copies = replace(content, weights=host_copies(weights), state=host_copies(state))
            self._saving.start(partial(save, copies))
        else:
            save(content)

    @property
    def failed(self) -> bool:
        """Whether a save in the background failed; `wait` raises its error."""
        return self._saving.failed

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises:
            TilenetError: The save failed, or another job has taken over the folder.
        """
        self._saving.wait()
        if self._lock is not None:
            self._lock.check()

    def close(self) -> None:
        """Wait without raising, for a run that ends because of another error."""
        self._saving.finish()

    def mark_best(self, step: int) -> None:
        """Link `best` to the checkpoint of a step, on the rank that writes."""
        self.wait()
        checkpoint = checkpoint_of_step(self.path, step)
        if self._write and checkpoint is not None:
            mark_best(self.path, checkpoint, self._keep)


def _empty(folder: Path) -> None:
    """Delete what is in a folder, which may be a link to one on another disk.

    Raises:
        OSError: Something in it cannot be moved aside.
    """
    for path in [*folder.iterdir()] if folder.is_dir() else ():
        # Half of a checkpoint is never called one; what is left of it is in no one's way.
        part = path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(4)}.part")
        path.rename(part)
        _delete(part)


def _delete(path: Path) -> None:
    """Delete a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)  # an NFS client may still hold its files
    else:
        path.unlink(missing_ok=True)
