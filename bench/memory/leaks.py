"""Does a run hold more and more, the longer it trains?

2 000 steps (quick: 200) of a small U-Net with instance norm over whole images on two ranks, in both
halo modes, with a validation and a checkpoint every twentieth of them and a report at the end. Both
ranks count their resident memory, open files, threads, Python's tensors and other objects,
communicators and requests. Judged are the last three quarters of the steps, memory in three ways:
the median of the slopes between any two counts (Theil-Sen), into which a heap that grows by one
piece in their middle comes too; what is added beside the largest growth between two counts, which
leaves that out, while a leak comes again; and all that is added.
"""

import gc
import os
import tempfile
from collections.abc import Callable
from datetime import date
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.report import Claim, Found, at_most, on_ranks
from bench.scenes import write_pair

if TYPE_CHECKING:
    from tilenet.training.config.run_file import RunFile

RANKS, SAMPLES = 2, 20
BYTES_PER_STEP = 256  # flat: 25 MB in 100 000 steps
ADDED_MIB = 1  # in all; quick: 4
SLOPE = "bytes per step, median of slopes"
BESIDE = "bytes per step beside the largest growth"
MODES = "overlap", "exchange"
COUNTS = "files", "threads", "tensors", "objects", "communicators", "request_slot"


def late(counts: dict[str, list[int]], name: str) -> list[int]:
    """Counts from the first quarter of the steps on; that after the run aside."""
    pairs = list(zip(counts["step"], counts[name], strict=True))[:-1]
    return [count for step, count in pairs if step >= counts["step"][-1] / 4]


def added(counts: dict[str, list[int]]) -> dict[str, float]:
    """By the last three quarters of a rank's steps."""
    held = late(counts, "rss_bytes")
    steps = late(counts, "step")
    largest = max(0, *(after - before for before, after in pairwise(held)))
    more: dict[str, float] = {of: late(counts, of)[-1] - late(counts, of)[0] for of in COUNTS}
    counted = combinations(zip(steps, held, strict=True), 2)
    slope = median((after - before) / (last - first) for (first, before), (last, after) in counted)
    beside = (held[-1] - held[0] - largest) / (steps[-1] - steps[0])
    return more | {"bytes": held[-1] - held[0], SLOPE: round(slope, 3), BESIDE: round(beside, 3)}


def judged(figures: dict[str, Any], *, quick: bool) -> list[Claim]:
    """Claims on the counts of all modes, beside which is put what they added."""
    claims = []
    for mode in MODES:
        ranks = [added(counts) for counts in figures[mode]["ranks"]]
        figures[mode]["added"] = ranks
        most = {of: max(rank[of] for rank in ranks) for of in ranks[0]}
        # In few steps heaps have not found their size.
        per_step, in_all = (BYTES_PER_STEP * 40, 4) if quick else (BYTES_PER_STEP, ADDED_MIB)
        claims += [
            *(at_most(f"{mode}: {of}", most[of], per_step) for of in (SLOPE, BESIDE)),
            at_most(f"{mode}: MiB added in all", most["bytes"] / 2**20, in_all),
            *(at_most(f"{mode}: {of} added", most[of], 1) for of in COUNTS),
        ]
    return claims


def bench(quick: bool) -> Found:
    """Train in both modes."""
    steps = 200 if quick else 2000
    figures: dict[str, Any] = {"date": date.today().isoformat(), "ranks": RANKS, "steps": steps}
    with tempfile.TemporaryDirectory() as name:
        write_pair(Path(name), (3, 128, 160), 3)
        for mode in MODES:
            figures[mode] = {"ranks": on_ranks(RANKS, trained, name, mode, steps)}
    return figures, judged(figures, quick=quick)


def run_file(folder: str, mode: Any, steps: int) -> "RunFile":
    """A small U-Net over both ranks, of which each does a bit of everything every few steps."""
    from tilenet.training.config.keys import MeshKeys, NetworkKeys, TileKeys
    from tilenet.training.config.run_file import RunFile
    from tilenet.training.config.validation_keys import ValidationKeys

    every = steps // SAMPLES
    return RunFile(
        images=f"{folder}/image.tif", labels=f"{folder}/image_labels.tif", classes=3,
        output=f"{folder}/{mode}", crop_px=64, batch_size=1, steps=steps, device="cpu",
        network=NetworkKeys(poolings=2, convolutions=1, base=4, norm="instance", dropout=0.1),
        validation=ValidationKeys(share=0.3, block_px=32, every=every), checkpoint_every=every,
        mesh=MeshKeys(columns=2), tiles=TileKeys(1, 2), halo_mode=mode,
    )  # fmt: skip


def count(step: int, communicators: int) -> dict[str, int]:
    """What this rank holds."""
    import torch
    from mpi4py import MPI

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
        "communicators": communicators,
        # MPICH hands out the slot that was given back last, so that only a leak makes it climb
        "request_slot": slot,
    }


def trained(folder: str, mode: str, steps: int) -> Any:
    """On this job's ranks: train and count every few steps; columns of counts for each rank."""
    from mpi4py import MPI

    import tilenet.library.whole_run
    from tilenet.parallel.ranks.comm import world
    from tilenet.training.step import Step

    live, counts = 0, list[dict[str, int]]()

    def made(name: str) -> Callable[..., Any]:
        def make(comm: MPI.Intracomm, *arguments: Any, **more: Any) -> "Counted":
            nonlocal live
            live += 1
            return Counted(getattr(MPI.Intracomm, name)(comm, *arguments, **more))

        return make

    class Counted(MPI.Intracomm):
        """All ranks, which counts the communicators that are made of it and not freed."""

        def Free(self) -> None:
            nonlocal live
            live -= 1
            MPI.Intracomm.Free(self)

    for name in ("Dup", "Split", "Split_type", "Create_group"):
        setattr(Counted, name, made(name))
    take: Callable[..., Any] = Step.take

    def counting(self: Step, step: int, *rest: Any) -> Any:
        if step % (steps // SAMPLES) == 0:
            counts.append(count(step, live))
        return take(self, step, *rest)

    Step.take = counting  # type: ignore[method-assign,assignment]
    comm = Counted(world())
    assert tilenet.library.whole_run.train(run_file(folder, mode, steps), comm=comm) == 0
    # After the run, with its report: nothing of it is held.
    counts.append(count(steps, live))
    return comm.gather({name: [one[name] for one in counts] for name in counts[0]})
