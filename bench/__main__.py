"""Run benches, keep what they found, and write bench/README.md from it.

    python -m bench                      their names
    python -m bench NAME --help          what it measures, and its options
    python -m bench NAME [--quick] [OPTION …]
    python -m bench NAME NAME …          one after another; --all: all of them
    python -m bench --page               bench/README.md alone

A bench is a file bench/*/NAME.py whose function `bench` returns figures and claims. They go to
bench/results/NAME.json, or, of a bench that names its device, to DEVICE.json; with --quick they are
only printed, as the last line.
"""

import argparse
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from bench import render
from bench.report import ROOT, Found, entry, environment

# What benches take from tests: references, scenes, Slurm's virtual nodes
TESTS = (
    *("adoption", "exactness", "training", "planning/memory", "swapping"),
    *("jobs/soak", "jobs/slurm"),
)


def module_of(name: str) -> Any:
    """A bench's module, with one thread and the tests' modules to import."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path += [str(ROOT / "tests" / folder) for folder in TESTS]
    path = render.programs()[name].relative_to(ROOT).with_suffix("")
    return import_module(".".join(path.parts))


def options_of(function: Callable[..., Found], module: Any, name: str) -> argparse.ArgumentParser:
    """The options of a bench: the arguments of its function, whose defaults tell their types."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench {name}", description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--output", metavar="FILE", help="in place of bench/results")
    for key, one in inspect.signature(function).parameters.items():
        option, default = f"--{key.replace('_', '-')}", one.default
        if key == "quick" or default is False:
            parser.add_argument(option, action="store_true")
        elif isinstance(default, tuple):
            kind = type(default[0]) if default else str
            parser.add_argument(option, nargs="+", type=kind, default=default)
        else:
            parser.add_argument(option, type=type(default), default=default)
    return parser


def run(name: str, arguments: list[str]) -> int:
    """Run a bench; print its claims and its JSON, and keep that."""
    module = module_of(name)
    options = vars(options_of(module.bench, module, name).parse_args(arguments))
    output = options.pop("output")
    result = entry(name, module.bench(**options))
    for claim in result["claims"]:
        mark = "holds" if claim["holds"] else "DOES NOT HOLD"
        print(f"{mark}: {claim['claim']} ({claim['value']:.4g}, goal {claim['goal']:.4g})")
    print(json.dumps(result), flush=True)
    if output:
        Path(output).write_text(json.dumps(result) + "\n")
    elif not options["quick"]:
        render.keep(result)
        render.write()
    held = all(claim["holds"] for claim in result["claims"])
    return 0 if held or not getattr(module, "STRICT", False) else 1


def child(place: str, arguments: str) -> None:
    """Run a function of a bench on this job's ranks; rank 0 prints what it returns."""
    sys.path += [str(ROOT / "tests" / folder) for folder in TESTS]
    module, _, name = place.partition(":")
    found = json.dumps(getattr(import_module(module), name)(*json.loads(arguments)))
    # A process alone need not have MPI.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or mpi.COMM_WORLD.rank == 0:
        print(found, flush=True)


def several(names: list[str]) -> int:
    """Run benches, each in a process of its own; what fails keeps what was found before."""
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", "bench", name]
        if subprocess.run(command, cwd=ROOT, env=environment(), check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed, what was found before is kept: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


def main(arguments: list[str]) -> int:
    """Do what is asked for."""
    if arguments[:1] == ["child"]:
        child(*arguments[1:])
        return 0
    known = render.benches()
    if arguments == ["--page"]:
        render.write()
        return 0
    if arguments in ([], ["--help"], ["-h"]):
        print(__doc__, *(f"{name:12} {render.question(name)}" for name in known), sep="\n")
        return 0
    names = known if arguments == ["--all"] else arguments[:1]
    while len(names) < len(arguments) and arguments[len(names)] in known:
        names = arguments[: len(names) + 1]
    unknown = sorted(set(names) - set(known))
    if unknown or (len(names) > 1 and names != arguments and arguments != ["--all"]):
        what = f"{unknown[0]} is no bench" if unknown else "options are for one bench at a time"
        print(f"{what}; benches: {', '.join(known)}", file=sys.stderr)
        return 2
    return several(names) if len(names) > 1 else run(names[0], arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
