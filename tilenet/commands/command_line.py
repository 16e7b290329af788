"""An argument parser that raises, so that a program on many ranks complains once."""

import argparse
from typing import NoReturn

from tilenet.errors import UsageError

__all__ = ["Arguments"]


class Arguments(argparse.ArgumentParser):
    """As argparse's, but `error` raises `UsageError`."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({' '.join(self.format_usage().split())})")
