"""The command line: tilenet COMMAND [options]."""

import os
import sys
import warnings
from contextlib import nullcontext
from importlib import import_module

from tilenet.errors import one_line
from tilenet.parallel.health.signals import handlers_come_back

COMMANDS = (
    "info",
    "halo",
    "check",
    "plan",
    "profile",
    "job",
    "batch",
    "pack",
    "train",
    "predict",
    "evaluate",
    "polygons",
    "export",
    "report",
    "preview",
)

USAGE = """usage: tilenet COMMAND [options]

  info       what images and their labels are: tilenet info IMAGE --labels LABELS
  halo       how wide a halo tiles need, for a network and an image
  check      whether your own network can be cut into tiles: tilenet check PACKAGE:NAME
  plan       tiles, ranks, partitions and micro-batches for a network, an image and a machine
  profile    measure a network's layers on this machine's device, for plan
  job        command lines and a cluster's job script from a plan: tilenet job plan.json
  batch      run a job on its first node: what its script ends in
  pack       the environment as one archive, for the nodes' own disks: tilenet pack ENV.tar
  train      train a network: tilenet train -c run.yaml
  predict    make a map: tilenet predict CHECKPOINT IMAGE OUT.tif
  evaluate   compare a map with labels: tilenet evaluate MAP LABELS
  polygons   the polygons of a map: tilenet polygons MAP OUT.gpkg
  export     a trained network for other programs: tilenet export RUN OUT.onnx
  report     write a page about a run: tilenet report RUN
  preview    see an image and its labels: tilenet preview IMAGE [LABELS] OUT.png

tilenet COMMAND --help explains a command. train, predict, polygons and info --pixels run on as
many ranks as they are started on: mpiexec -n 4 tilenet train -c run.yaml"""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns its exit code.

    0: done, 1: error, 2: usage, 75: stopped on request.
    """
    # A library's warning, which may quote names of files, in one line.
    warnings.formatwarning = lambda message, category, filename, lineno, line=None: (
        one_line(f"{filename}:{lineno}: {category.__name__}: {message}") + "\n"
    )
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        # Called by a program that goes on: signals mean then what they meant before.
        with nullcontext() if arguments is None else handlers_come_back():
            return _run(command, rest)
    except BrokenPipeError:  # the reader has seen enough: tilenet halo … | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(command: str, rest: list[str]) -> int:
    if command in COMMANDS:
        # Imported by name: the halo calculator answers at once, and MPI starts where it is used.
        # launch/ is installed in tilenet/, wherever it lies in a checkout.
        rooms = {"job": "launch.__main__", "batch": "launch.batch", "pack": "launch.pack"}
        name = rooms.get(command, f"cli.{command}")
        module = import_module(f"tilenet.{name}")
        return int(module.main(rest))
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    if command == "--version":
        from tilenet import __version__  # looked up in the package's metadata

        print(__version__)
        return 0
    print(f"{USAGE}\n\ntilenet: there is no command {one_line(command)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
