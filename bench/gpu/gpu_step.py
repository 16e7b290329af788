"""Whole steps of training and a map on a GPU, against the same layers in a loop of plain torch.

The preset `small`: one image of 1434², and 8 crops of 256². Plain torch has torch's own norms, no
dropout, and its pixels and labels on the device. Of one step of each a profile says how long the
device was busy, how many kernels ran, and how often the host waited.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from bench.gpu.gpu_part import Asked, Figures, wait
from bench.report import Claim, Found, at_most
from bench.scenes import write_pair

__all__ = ["steps"]

WAITS = "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"
STEPS, WARM = 12, 5  # cuDNN and the allocator settle before


@dataclass(frozen=True)
class Case:
    """What a step sees."""

    side: int
    crop_px: int | None
    batch: int


IMAGE, CROPS = Case(1434, None, 1), Case(1434, 256, 8)
TINY = Case(128, None, 1), Case(128, 64, 2)
PRECISIONS = "float32", "tf32", "bfloat16"


def profiled(work: Callable[[], object], device: torch.device) -> Figures:
    """What the device and the host did during some work; nothing on a CPU."""
    if device.type != "cuda":
        work()
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        work()
        wait(device)
    rows = found.key_averages()
    on_device = [row for row in rows if row.device_type.name == "CUDA"]
    kernels = [row for row in on_device if not row.key.startswith("Mem")]
    longest = sorted(kernels, key=lambda row: -row.self_device_time_total)[:12]
    return {
        "busy_s": sum(row.self_device_time_total for row in on_device) / 1e6,
        "kernels": sum(row.count for row in kernels),
        "copies": {row.key: row.count for row in on_device if row.key.startswith("Mem")},
        "waits": sum(row.count for row in rows if row.key in WAITS) - 1,  # the last is our own
        "longest_s": {row.key[:80]: row.self_device_time_total / 1e6 for row in longest},
    }


@contextmanager
def clocked(device: torch.device) -> Iterator[tuple[list[float], Figures]]:
    """Ends of a run's steps, and the profile of the last."""
    from tilenet.library import whole_run
    from tilenet.training.step import Step

    ends: list[float] = []
    seen: Figures = {}
    take = Step.take

    def timed(self: Step, *arguments: Any) -> Any:
        done: list[Any] = []

        def step() -> None:
            done.append(take(self, *arguments))

        if len(ends) == STEPS:
            seen.update(profiled(step, device))
        else:
            step()
            wait(device)
            ends.append(time.perf_counter())
        return done[0]

    with patch.object(Step, "take", timed), patch.object(whole_run, "try_report"):
        yield ends, seen


def median(ends: list[float]) -> float:
    """Of the seconds between steps, without the first ones."""
    times = [later - one for one, later in pairwise(ends)][WARM:]
    return sorted(times)[len(times) // 2]


def of_a_run(folder: Path, case: Case, precision: Any, asked: Asked) -> Figures:
    """Steps of `tilenet.train`."""
    from mpi4py import MPI

    from tilenet.library import whole_run
    from tilenet.training.config.keys import NetworkKeys, OptimizerKeys
    from tilenet.training.config.run_file import RunFile

    base = None if asked.cuda else 4
    run = RunFile(
        images=f"{folder}/image.tif", labels=f"{folder}/image_labels.tif", classes=6,
        output=str(folder / "run"), steps=STEPS + 1, batch_size=case.batch, crop_px=case.crop_px,
        network=NetworkKeys(preset="small", base=base), optimizer=OptimizerKeys("adamw"),
        checkpoint_every=10**6, precision=precision, prove=False,
        device="cuda" if asked.cuda else "cpu",
    )  # fmt: skip
    _reset(asked)
    with clocked(asked.device) as (ends, seen):
        whole_run.train(run, overwrite=True, comm=MPI.COMM_SELF)
    return {"seconds": median(ends), "peak_bytes": _peak(asked), **seen}


def of_plain_torch(case: Case, precision: str, asked: Asked) -> Figures:
    """The same of torch's own modules."""
    from tilenet.geometry.unet import PRESETS, unet_layers
    from tilenet.model.network import build_network
    from tilenet.parallel.ranks.tf32 import tf32_if_asked

    base = PRESETS["small"].base if asked.cuda else 4
    layers = unet_layers(replace(PRESETS["small"], base=base, classes=6, dropout=0.0))
    network = build_network(layers, 1, torch.float32).train().to(asked.device)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    side = -(-(case.crop_px or case.side) // 32) * 32
    x = torch.randn(case.batch, 4, side, side, device=asked.device)
    labels = torch.randint(6, (case.batch, side, side), device=asked.device)
    narrow = torch.autocast(asked.device.type, torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        with narrow if precision == "bfloat16" else nullcontext():
            logits = network(x)
        F.cross_entropy(logits.float(), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    ends: list[float] = []
    _reset(asked)
    with tf32_if_asked(precision):
        for _ in range(STEPS):
            step()
            wait(asked.device)
            ends.append(time.perf_counter())
        seen = profiled(step, asked.device)
    return {"seconds": median(ends), "peak_bytes": _peak(asked), **seen}


def of_a_map(folder: Path, asked: Asked) -> Figures:
    """Seconds of `tilenet.predict`, whole, and of plain torch's forward passes of 2048²."""
    import tilenet
    from tilenet.geometry.unet import PRESETS, unet_layers
    from tilenet.model.network import build_network

    side, tile = (6144, 2048) if asked.cuda else (128, 64)
    write_pair(folder, (4, side, side), 6, name="large", dtype="uint8", values=(1, 250))
    predict = partial(
        tilenet.predict, f"{folder}/run", f"{folder}/large.tif", f"{folder}/map.tif",
        overwrite=True, device="cuda" if asked.cuda else "cpu", precision="float32",
    )  # fmt: skip
    base = PRESETS["small"].base if asked.cuda else 4
    layers = unet_layers(replace(PRESETS["small"], base=base, classes=6, dropout=0.0))
    network = build_network(layers, 1, torch.float32).eval().to(asked.device)
    x = torch.randn(1, 4, tile, tile, device=asked.device)
    torch.backends.cudnn.allow_tf32 = False

    def plain() -> None:
        with torch.inference_mode():
            for _ in range((side // tile) ** 2):
                network(x).argmax(1)

    found: Figures = {"pixels": side**2}
    for name, work in (("tilenet", predict), ("plain torch", plain)):
        times = []
        for _ in range(2):
            began = time.perf_counter()
            work()
            wait(asked.device)
            times.append(time.perf_counter() - began)
        found[name] = {"first_s": times[0], "seconds": times[1]}
    return found


def _reset(asked: Asked) -> None:
    if asked.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(asked.device)


def _peak(asked: Asked) -> int:
    return torch.cuda.max_memory_allocated(asked.device) if asked.cuda else 0


def steps(asked: Asked) -> Found:
    """All cases in all precisions, then a map."""
    from tilenet.parallel.exchange import norm

    rows: list[Figures] = []
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pair(folder, (4, IMAGE.side, IMAGE.side) if asked.cuda else (4, 128, 128), 6)
        for case in (IMAGE, CROPS) if asked.cuda else TINY:
            for precision in PRECISIONS if asked.cuda else ("float32",):
                if asked.late or not asked.computes(precision):
                    continue
                ours = of_a_run(folder, case, precision, asked)
                plain = of_plain_torch(case, precision, asked)
                ratio = ours["seconds"] / plain["seconds"]
                row = {"side": case.side, "crop_px": case.crop_px, "batch": case.batch}
                rows.append({**row, "precision": precision, "tilenet": ours, "plain": plain})
                what = f"{case.batch} of {case.crop_px or case.side}², {precision}"
                claims.append(at_most(f"seconds of a step over plain torch's, {what}", ratio, 1.2))
                print(what, {k: (ours[k], plain[k]) for k in ours if k != "longest_s"}, flush=True)
        with patch.object(norm, "kernels_pay", lambda device: False):
            rows.append({"norms": "own", **of_a_run(folder, case, "float32", asked)})
        map_of = of_a_map(folder, asked)
    ratio = map_of["tilenet"]["seconds"] / map_of["plain torch"]["seconds"]
    claims.append(at_most("seconds of a map over plain torch's forward passes", ratio, 1.5))
    return {"rows": rows, "map": map_of}, claims if asked.cuda else []
