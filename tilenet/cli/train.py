"""`tilenet train`: read the run file once, then train on all ranks."""

import sys

from tilenet.cli.options.data import with_values
from tilenet.errors import AgreedError, UsageError
from tilenet.library.train import read_once
from tilenet.library.whole_run import train
from tilenet.parallel.ranks.abort import run_as_rank
from tilenet.parallel.ranks.comm import world
from tilenet.training.config.read import read_run_file
from tilenet.training.config.run_file import RunFile


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    return run_as_rank(lambda: _train(arguments))


def _train(arguments: list[str]) -> int:
    if {"-h", "--help", "--print_config"} & {a.split("=")[0] for a in arguments}:
        read_run_file(with_values(arguments))  # prints and exits
    comm = world()

    def read() -> tuple[RunFile, tuple[bool, bool]]:
        run, options = read_run_file(with_values(arguments))
        return run, (bool(options.resume), bool(options.overwrite))

    try:
        run, (resume, overwrite) = read_once(read, comm)
    except AgreedError as error:
        if not isinstance(error.__cause__, UsageError):
            raise
        if comm.rank == 0:
            print(f"tilenet train: {error}", file=sys.stderr)
        return 2
    return train(run, resume=resume, overwrite=overwrite, comm=comm)
