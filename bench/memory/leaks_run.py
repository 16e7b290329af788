"""A training run that counts what it holds; bench/memory/leaks.py starts it on some ranks.

Trains with halos by MODE on images in FOLDER, with validation, checkpoints and a report, and counts
every few steps.
"""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import torch
from mpi4py import MPI

import tilenet.train
from tilenet.parallel.ranks.comm import world
from tilenet.training.config.keys import MeshKeys, NetworkKeys, TileKeys
from tilenet.training.config.run_file import RunFile
from tilenet.training.config.validation_keys import ValidationKeys
from tilenet.training.step import Step

SAMPLES = 20


class Counted(MPI.Intracomm):
    """All ranks, which counts the communicators that are made of it and not freed."""

    live = 0

    def Dup(self, info: MPI.Info | None = None) -> "Counted":
        return self._made(MPI.Intracomm.Dup(self, info))

    def Split(self, color: int = 0, key: int = 0) -> "Counted":
        return self._made(MPI.Intracomm.Split(self, color, key))

    def Split_type(self, kind: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> "Counted":
        return self._made(MPI.Intracomm.Split_type(self, kind, key, info))

    def Create_group(self, group: MPI.Group, tag: int = 0) -> "Counted":
        return self._made(MPI.Intracomm.Create_group(self, group, tag))

    def Free(self) -> None:
        Counted.live -= 1
        MPI.Intracomm.Free(self)

    def _made(self, comm: MPI.Comm) -> "Counted":
        Counted.live += 1
        return Counted(cast("MPI.Intracomm", comm))


def run_file(folder: str, mode: Literal["overlap", "exchange"], steps: int) -> RunFile:
    """A small U-Net over both ranks, of which each does a bit of everything every few steps."""
    return RunFile(
        images=f"{folder}/image.tif",
        labels=f"{folder}/image_labels.tif",
        classes=3,
        output=f"{folder}/{mode}",
        network=NetworkKeys(poolings=2, convolutions=1, base=4, norm="instance", dropout=0.1),
        validation=ValidationKeys(share=0.3, block_px=32, every=steps // SAMPLES),
        mesh=MeshKeys(columns=2),
        tiles=TileKeys(1, 2),
        halo_mode=mode,
        crop_px=64,
        batch_size=1,
        steps=steps,
        checkpoint_every=steps // SAMPLES,
        device="cpu",
    )


def count(step: int) -> dict[str, int]:
    """What this rank holds."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kinds = [type(one) for one in gc.get_objects()]
    request = MPI.COMM_SELF.Irecv(bytearray(1))
    slot = MPI._handleof(request) & 0x03FFFFFF
    request.Cancel()
    request.Wait()
    return {
        "step": step,
        "rss_bytes": int(status["VmRSS"].split()[0]) * 1024,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "tensors": sum(issubclass(kind, torch.Tensor) for kind in kinds),
        "objects": len(kinds),
        "communicators": Counted.live,
        # MPICH hands out the slot that was given back last, so that only a leak makes it climb
        "request_slot": slot,
    }


def trained(folder: str, mode: Literal["overlap", "exchange"], steps: int) -> Any:
    """Train and count; columns of counts for each rank."""
    comm = Counted(world())
    counts: list[dict[str, int]] = []
    take: Callable[..., Any] = Step.take

    def counting(self: Step, step: int, *rest: Any) -> Any:
        if step % (steps // SAMPLES) == 0:
            counts.append(count(step))
        return take(self, step, *rest)

    Step.take = counting  # type: ignore[method-assign,assignment]
    assert tilenet.train.train(run_file(folder, mode, steps), comm=comm) == 0
    # After the run, with its report: nothing of it is held.
    counts.append(count(steps))
    columns = {name: [one[name] for one in counts] for name in counts[0]}
    return comm.gather(columns)
