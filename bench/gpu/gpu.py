"""What a GPU says: exactness, memory, speed, largest images, copies beside work, the roofline.

    python -m bench.gpu.gpu [--quick] [--keep] [--machine NAME] [--limit-gib N] [--parts NAME ...]

On one CUDA GPU, which is named several times where there are partitions, in less than 8 minutes.
Each part runs in a process of its own, with a budget of seconds:

(tiles, partitions, swaps) float64 losses and gradients in tiles, in a pipeline with checkpointing,
and with swapping, against the same network on the same GPU without (`gpu_exactness.py`);
(memory) the peak that torch's allocator saw during the third step of training against
`planning.memory`, calibrated by the first case, since cuDNN's workspace is no tensor;
(speed, compiled) seconds of training per megapixel in each precision, with channels last, and with
torch.compile;
(sizes) the largest image that trains under a limit of 8 GiB with nothing done, checkpointing, swap
and auto, beside the planner's;
(overlap) pinned copies beside convolutions;
(roofline) seconds of the roofline over measured ones, by kind of layer, with the peaks of the
machine whose device is called so, or of --machine.

A part that fails is a claim that does not hold. --keep writes results/DEVICE.json. Without a GPU it
says so and measures nothing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from datetime import date
from importlib import import_module
from io import StringIO
from tempfile import TemporaryFile

import torch

from bench.gpu.gpu_part import Asked, Figures, Part
from bench.report import ROOT, Claim, device_stem, report

RESULTS = ROOT / "bench" / "results"

# Where it is, seconds it should take, and whether its failure is one of ours
PARTS: dict[str, tuple[str, int, bool]] = {
    "tiles": ("bench.gpu.gpu_exactness.tiles", 30, True),
    "partitions": ("bench.gpu.gpu_exactness.partitions", 45, True),
    "swaps": ("bench.gpu.gpu_exactness.swaps", 30, True),
    "memory": ("bench.gpu.gpu_memory.memory", 70, True),
    "speed": ("bench.gpu.gpu_speed.speed", 40, True),
    "sizes": ("bench.gpu.gpu_sizes.sizes", 110, True),
    "overlap": ("bench.gpu.gpu_overlap.overlap", 25, True),
    "roofline": ("bench.gpu.gpu_roofline.shares", 25, True),
    "compiled": ("bench.gpu.gpu_speed.compiled", 60, False),
}
GRACE_S = 20  # beyond its budget a part is ended
ALL_S = 470
WORD = "part "
Said = tuple[Figures, list[Claim]]


def answer(part: Part, asked: Asked) -> str:
    """Run a part in this process; a JSON line with what it found or why it failed."""
    try:
        figures, claims = part(asked)
    except Exception as error:  # whatever a GPU's libraries raise
        return WORD + json.dumps({"failed": _sentence(error)})
    said = {"figures": figures, "claims": [asdict(claim) for claim in claims]}
    return WORD + json.dumps(said)


def failed(name: str, why: str) -> Said:
    """What is said of a part that did not end: a sentence, and a claim that does not hold."""
    sentence = f"{name} failed: {why}"
    claims = [Claim(sentence, 1, 0, False)] if PARTS[name][2] else []
    return {"failed": sentence}, claims


def run_part(name: str, options: list[str], limit_s: float) -> Said:
    """Run a part in a process of its own, and end that when its time is over."""
    command = [sys.executable, "-m", "bench.gpu.gpu", "--part", name, *options]
    # Files and a session of its own, since compilers that it started may hold pipes open.
    with TemporaryFile("w+") as printed, TemporaryFile("w+") as errors:
        running = subprocess.Popen(command, stdout=printed, stderr=errors, start_new_session=True)
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


def read(name: str, printed: str, errors: str, code: int) -> Said:
    """What a part's process said in its last line."""
    last = (printed.strip().splitlines() or [""])[-1]
    if not last.startswith(WORD):
        why = (errors.strip().splitlines() or ["it said nothing"])[-1][:300].replace("|", "/")
        return failed(name, f"its process ended with {code}: {why}")
    found = json.loads(last.removeprefix(WORD))
    if "failed" in found:
        return failed(name, found["failed"])
    return found["figures"], [Claim(**claim) for claim in found["claims"]]


def _sentence(error: Exception) -> str:
    words = (str(error).strip().splitlines() or [""])[0].replace("|", "/")
    return f"{type(error).__name__}: {words}"[:300]


def main() -> None:
    """Run the parts one after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", action="store_true", help="write bench/results/DEVICE.json")
    parser.add_argument("--machine", help="whose peaks to compare with; default: by the device")
    parser.add_argument("--limit-gib", type=float, help="for the largest images; default: 8")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda:0", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        place, budget_s, _ = PARTS[given.part]
        module, _, function = place.rpartition(".")
        until = time.perf_counter() + budget_s
        if given.device == "cpu":
            torch.set_num_threads(1)
        part: Part = getattr(import_module(module), function)
        where = torch.device(given.device)
        asked = Asked(where, given.quick, until, given.machine, given.limit_gib)
        print(answer(part, asked), flush=True)
        return
    if given.device != "cpu" and not torch.cuda.is_available():
        report("gpu", {"device": "none: torch sees no GPU, nothing was measured"}, [])
        return
    options = ["--device", given.device, *(["--quick"] if given.quick else [])]
    options += ["--machine", given.machine] if given.machine else []
    options += ["--limit-gib", str(given.limit_gib)] if given.limit_gib else []
    device = "cpu" if given.device == "cpu" else torch.cuda.get_device_name(given.device)
    figures: Figures = {"device": device, "date": str(date.today())}
    claims: list[Claim] = []
    began, seconds = time.perf_counter(), dict[str, float]()
    for name in given.parts:
        left = ALL_S - (time.perf_counter() - began)
        begun = time.perf_counter()
        found, made = run_part(name, options, max(1.0, min(PARTS[name][1] + GRACE_S, left)))
        seconds[name] = time.perf_counter() - begun
        print(f"{name}: {seconds[name]:.1f} s of {PARTS[name][1]}", flush=True)
        figures[name] = found
        claims += made
    figures["seconds"] = {**seconds, "all": time.perf_counter() - began}
    if given.keep:
        _keep(figures, claims, device)
    report("gpu", figures, claims)


def _keep(figures: Figures, claims: list[Claim], device: str) -> None:
    printed = StringIO()
    with redirect_stdout(printed):
        report("gpu", figures, claims)
    path = RESULTS / f"{device_stem(device)}.json"
    aside = path.with_suffix(".json.part")
    aside.write_text(printed.getvalue().splitlines()[-1] + "\n")
    aside.replace(path)
    print(f"kept in {path}")


if __name__ == "__main__":
    main()
