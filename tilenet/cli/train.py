"""`tilenet train`: read the run file once, then train on all ranks."""

import sys

from tilenet.cli.data_options import with_values
from tilenet.errors import AgreedError, TilenetError, UsageError
from tilenet.library.whole_run import train
from tilenet.parallel.health.progress import say
from tilenet.parallel.ranks.comm import run_as_rank, world
from tilenet.training.config.read import read_run_file, with_listed_images
from tilenet.training.config.run_file import RunFile

__all__ = ["main"]

FLAGS = "resume", "overwrite"


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    return run_as_rank(lambda: _train(arguments))


def _train(arguments: list[str]) -> int:
    if {"-h", "--help", "--print_config"} & {a.split("=")[0] for a in arguments}:
        read_run_file(with_values(arguments))  # prints and exits
    comm = world()
    # Read once and handed out: a file that differs between nodes, or is missing on one, would have
    # the ranks do different things.
    read: tuple[RunFile, dict[str, bool]] | TilenetError | UsageError | None = None
    if comm.rank == 0:
        try:
            run, given = read_run_file(with_values(arguments))
            run, notes = with_listed_images(run)
            for note in notes:
                say(note)
            read = run, {name: bool(given[name]) for name in FLAGS}
        except (TilenetError, UsageError) as error:
            read = error
    read = comm.bcast(read)
    if isinstance(read, UsageError):
        if comm.rank == 0:
            print(f"tilenet train: {read}", file=sys.stderr)
        return 2
    if isinstance(read, TilenetError):
        raise AgreedError(str(read))
    assert read is not None
    run, flags = read
    return train(run, **flags)
