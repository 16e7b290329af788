"""The command line: tilenet COMMAND [options]."""

import os
import sys

USAGE = """usage: tilenet COMMAND [options]

  info       what images and their labels are: tilenet info IMAGE --labels LABELS
  halo       how wide a halo tiles need, for a network and an image
  plan       tiles, ranks, partitions and micro-batches for a network, an image and a machine
  profile    measure a network's layers on this machine's device, for plan
  train      train a network: tilenet train -c run.yaml
  predict    make a map: tilenet predict CHECKPOINT IMAGE OUT.tif
  evaluate   compare a map with labels: tilenet evaluate MAP LABELS
  report     write a page about a run: tilenet report RUN
  preview    see an image and its labels: tilenet preview IMAGE [LABELS] OUT.png

tilenet COMMAND --help explains a command. train, predict and info --pixels run on as many ranks as
they are started on: mpiexec -n 4 tilenet train -c run.yaml"""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns its exit code: 0 done, 1 error, 2 usage, 75 stopped on request."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        return _run(command, rest)
    except BrokenPipeError:  # the reader has seen enough: tilenet halo … | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(command: str, rest: list[str]) -> int:
    # Imported by command: the halo calculator answers at once, and MPI starts where it is used.
    if command == "info":
        from tilenet import info_command

        return info_command.main(rest)
    if command == "halo":
        from tilenet import halo_command

        return halo_command.main(rest)
    if command == "plan":
        from tilenet import plan_command

        return plan_command.main(rest)
    if command == "profile":
        from tilenet import profile_command

        return profile_command.main(rest)
    if command == "train":
        from tilenet import train_command

        return train_command.main(rest)
    if command == "predict":
        from tilenet import predict_command

        return predict_command.main(rest)
    if command == "evaluate":
        from tilenet import evaluate

        return evaluate.main(rest)
    if command == "report":
        from tilenet import report_command

        return report_command.main(rest)
    if command == "preview":
        from tilenet import preview_command

        return preview_command.main(rest)
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    if command == "--version":
        from importlib.metadata import version

        print(version("tilenet"))
        return 0
    print(f"{USAGE}\n\ntilenet: there is no command {command}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
