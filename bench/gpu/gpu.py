"""What a GPU says: exactness, memory, speed, largest images, copies beside work, the roofline.

On one CUDA GPU, which is named several times where there are partitions, in less than 8 minutes.
Each part runs in a process of its own, with a budget of seconds:

(tiles, partitions, swaps) float64 losses and gradients in tiles, in a pipeline with checkpointing,
and with swapping, against the same network on the same GPU without (`gpu_exactness.py`);
(memory) the peak that torch's allocator saw during the third step of training against
`planning.memory`, calibrated by the first case, since cuDNN's workspace is no tensor;
(speed) seconds of training per megapixel in each precision, and with channels last;
(sizes) the largest image that trains under a limit of 8 GiB with nothing done, checkpointing, swap
and auto, beside the planner's;
(overlap) pinned copies beside convolutions;
(roofline) seconds of the roofline over measured ones, by kind of layer, with the peaks of the
machine whose device is called so, or of --machine.

A part that fails is a claim that does not hold. The result is kept as results/DEVICE.json. Without
a GPU it says so and measures nothing.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import date
from importlib import import_module
from tempfile import TemporaryFile
from typing import Any

import torch

from bench.gpu.gpu_part import Asked, Figures, Part
from bench.report import ROOT, Claim, Found, child, environment

# Where it is, and seconds it should take
PARTS: dict[str, tuple[str, int]] = {
    "tiles": ("bench.gpu.gpu_exactness.tiles", 30),
    "partitions": ("bench.gpu.gpu_exactness.partitions", 45),
    "swaps": ("bench.gpu.gpu_exactness.swaps", 30),
    "memory": ("bench.gpu.gpu_memory.memory", 70),
    "speed": ("bench.gpu.gpu_speed.speed", 40),
    "sizes": ("bench.gpu.gpu_sizes.sizes", 110),
    "overlap": ("bench.gpu.gpu_overlap.overlap", 25),
    "roofline": ("bench.gpu.gpu_roofline.shares", 25),
}
GRACE_S = 20  # beyond its budget a part is ended
ALL_S = 470


def answer(name: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Run a part in this process; what it found or why it failed."""
    place, budget_s = PARTS[name]
    module, _, function = place.rpartition(".")
    device = torch.device(asked.pop("device"))
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        part: Part = getattr(import_module(module), function)
        figures, claims = part(Asked(device, until=time.perf_counter() + budget_s, **asked))
    except Exception as error:  # whatever a GPU's libraries raise
        words = (str(error).strip().splitlines() or [""])[0].replace("|", "/")
        return {"failed": f"{type(error).__name__}: {words}"[:300]}
    return {"figures": figures, "claims": [asdict(claim) for claim in claims]}


def failed(name: str, why: str) -> Found:
    """What is said of a part that did not end: a sentence, and a claim that does not hold."""
    sentence = f"{name} failed: {why}"
    return {"failed": sentence}, [Claim(sentence, 1, 0, False)]


def run_part(name: str, asked: dict[str, Any], limit_s: float) -> Found:
    """Run a part in a process of its own, and end that when its time is over."""
    # Files and a session of its own, since compilers that it started may hold pipes open.
    with TemporaryFile("w+") as printed, TemporaryFile("w+") as errors:
        running = subprocess.Popen(
            [sys.executable, *child(answer, name, asked)], stdout=printed, stderr=errors,
            start_new_session=True, cwd=ROOT, env=environment(),
        )  # fmt: skip
        try:
            code: int | None = running.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        printed.seek(0)
        errors.seek(0)
        shown, wrong = printed.read(), errors.read()
    if code is not None:
        return read(name, shown, wrong, code)
    figures, claims = failed(name, f"its {limit_s:.0f} s were over")
    return {**figures, "before": shown.splitlines()}, claims


def read(name: str, printed: str, errors: str, code: int) -> Found:
    """What a part's process said in its last line."""
    if code:
        why = (errors.strip().splitlines() or ["it said nothing"])[-1][:300].replace("|", "/")
        return failed(name, f"its process ended with {code}: {why}")
    found = json.loads(printed.splitlines()[-1])
    if "failed" in found:
        return failed(name, found["failed"])
    return found["figures"], [Claim(**claim) for claim in found["claims"]]


def bench(
    quick: bool, machine: str = "", limit_gib: float = 0.0, parts: tuple[str, ...] = (),
    device: str = "cuda:0",
) -> Found:  # fmt: skip
    """Run the parts one after another."""
    if device != "cpu" and not torch.cuda.is_available():
        return {"device": "none: torch sees no GPU, nothing was measured"}, []
    name_of = "cpu" if device == "cpu" else torch.cuda.get_device_name(device)
    asked = {"device": device, "quick": quick, "machine": machine or None}
    asked |= {"limit_gib": limit_gib or None}
    figures: Figures = {"device": name_of, "date": str(date.today())}
    claims: list[Claim] = []
    began, seconds = time.perf_counter(), dict[str, float]()
    for name in parts or PARTS:
        left = ALL_S - (time.perf_counter() - began)
        begun = time.perf_counter()
        figures[name], made = run_part(name, asked, max(1.0, min(PARTS[name][1] + GRACE_S, left)))
        seconds[name] = time.perf_counter() - begun
        print(f"{name}: {seconds[name]:.1f} s of {PARTS[name][1]}", flush=True)
        claims += made
    figures["seconds"] = {**seconds, "all": time.perf_counter() - began}
    return figures, claims
