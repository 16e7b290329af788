"""What a GPU says: exactness, memory, largest images, copies beside work, the roofline.

On one CUDA GPU, which is named several times where there are partitions, in less than 8 minutes.
Each part runs in a process of its own, with a budget of seconds:

(tests) those that are marked `gpu`: float64 losses and gradients in tiles, in a pipeline with
checkpointing, with maps on the host, and with swapping, against the same network without; and
whole runs over two ranks that share the GPU, against the network on the whole image;
(steps) whole steps and a map against plain torch, in float32, TF32 and bfloat16;
(memory) the peak that torch's allocator saw during the third step of training against
`planning.memory`, calibrated by the first case, since cuDNN's workspace is no tensor;
(sizes) the largest image that trains under a limit of 8 GiB with nothing done, checkpointing or
swap, against the planner's;
(overlap) pinned copies at the same time as convolutions;
(roofline) seconds of the roofline over measured ones, by kind of layer, with the peaks of the
machine whose device is called so, or of --machine.

A part that fails is a claim that does not hold. The result is kept as results/DEVICE.json. Without
a GPU it says so and measures nothing.
"""

import re
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import date
from importlib import import_module
from typing import Any

import torch

from bench.gpu.gpu_part import Asked, Figures
from bench.report import ROOT, Claim, Found, alone, at_least, at_most

# Where it is, and seconds it should take
PARTS: dict[str, tuple[str, int]] = {
    "tests": ("bench.gpu.gpu.tests", 90),
    "steps": ("bench.gpu.gpu_step.steps", 120),
    "memory": ("bench.gpu.gpu_memory.memory", 70),
    "sizes": ("bench.gpu.gpu_sizes.sizes", 110),
    "overlap": ("bench.gpu.gpu_overlap.overlap", 25),
    "roofline": ("bench.gpu.gpu_roofline.shares", 25),
}
GRACE_S = 20  # beyond its budget a part is ended
ALL_S = 470
LEAST_TESTS = 10


def tests(asked: Asked) -> Found:
    """Run the tests that need a GPU, and those of exchange over two ranks that share it."""
    folders = [str(ROOT / "tests" / folder) for folder in ("parallel", "swapping")]
    shared = str(ROOT / "tests/exactness/test_same_in_exchange.py")
    python = [sys.executable, "-m"]
    ways = {
        "need a GPU": [*python, "pytest", "-q", "-m", "gpu", *folders],
        "share a GPU": [
            "mpiexec", "-n", "2", *python, "mpi4py", "-m", "pytest", "-q", "--ranks", "2",
            "--device", "cuda", shared,
        ],
    }  # fmt: skip
    figures, claims = Figures(), list[Claim]()
    for what, command in ways.items():
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        said = ended.stdout.strip().splitlines() or [""]
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", said[-1])}
        passed = counts.get("passed", 0)
        bad = sum(counts.get(word, 0) for word in ("failed", "error", "errors"))
        claims += [
            at_least(f"tests that {what} and pass", passed, LEAST_TESTS),
            at_most(f"tests that {what} and fail", bad, 0),
        ]
        broken = [line for line in said if line.startswith(("FAILED", "ERROR"))]
        figures[what] = {**counts, "broken": broken}
    return figures, claims if asked.cuda else []


def answer(name: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Run a part in this process; what it found or why it failed."""
    place, budget_s = PARTS[name]
    module, _, function = place.rpartition(".")
    device = torch.device(asked.pop("device"))
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)  # which starts CUDA, too
    try:
        part = getattr(import_module(module), function)
        figures, claims = part(Asked(device, until=time.perf_counter() + budget_s, **asked))
    except Exception as error:  # whatever a GPU's libraries raise
        return {"failed": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"}
    return {"figures": figures, "claims": [asdict(claim) for claim in claims]}


def run_part(name: str, asked: dict[str, Any], limit_s: float) -> Found:
    """Run a part in a process of its own, and end that when its time is over.

    Of one that fails there is a sentence, and a claim that does not hold.
    """
    before: list[str] = []
    try:
        found = alone(answer, name, asked, limit_s=limit_s)
    except subprocess.TimeoutExpired as late:
        found = {"failed": f"its {limit_s:.0f} s were over"}
        before = (late.stdout or b"").decode().splitlines()
    except RuntimeError as error:
        first, *said = str(error).strip().splitlines()
        code = first.rpartition(" ended with ")[2]
        found = {"failed": f"its process ended with {code} {said[-1] if said else ''}"}
    if "failed" not in found:
        return found["figures"], [Claim(**claim) for claim in found["claims"]]
    sentence = f"{name} failed: {found['failed']}"[:300].replace("|", "/")
    return {"failed": sentence, "before": before}, [Claim(sentence, 1, 0, False)]


def bench(
    quick: bool, machine: str = "", limit_gib: float = 0.0, parts: tuple[str, ...] = (),
    device: str = "cuda:0",
) -> Found:  # fmt: skip
    """Run the parts one after another."""
    if device != "cpu" and not torch.cuda.is_available():
        return {"device": "none: torch sees no GPU, nothing was measured"}, []
    name_of = "cpu" if device == "cpu" else torch.cuda.get_device_name(device)
    asked = {"device": device, "quick": quick, "machine": machine, "limit_gib": limit_gib}
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
