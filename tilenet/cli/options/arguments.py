"""An argument parser that raises, so that a program on many ranks complains once."""

import argparse
import sys
from collections.abc import Callable
from functools import wraps
from typing import NoReturn

from tilenet.errors import TilenetError, UsageError


class Arguments(argparse.ArgumentParser):
    """A parser of argparse with an `error` that raises `UsageError`."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({' '.join(self.format_usage().split())})")


def command(name: str) -> Callable[[Callable[[list[str]], None]], Callable[[list[str]], int]]:
    """Return a decorator for a command of one rank: it prints errors and returns an exit code."""

    def with_code(run: Callable[[list[str]], None]) -> Callable[[list[str]], int]:
        @wraps(run)
        def main(arguments: list[str]) -> int:
            try:
                run(arguments)
            except UsageError as error:
                print(f"tilenet {name}: {error}", file=sys.stderr)
                return 2
            except TilenetError as error:
                print(f"tilenet: {error}", file=sys.stderr)
                return 1
            return 0

        return main

    return with_code
