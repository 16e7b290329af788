"""The error that is the user's to mend: said in one sentence, without a traceback."""

__all__ = ["AgreedError", "TilenetError", "UsageError"]


class TilenetError(Exception):
    """Raised when a request cannot be carried out: the rule, the values, the remedy.

    Everything else that is raised is a mistake of ours and keeps its traceback.
    """


class AgreedError(TilenetError):
    """Raised on every rank in the same words: each may end by itself, none waits for another."""


class UsageError(Exception):
    """Raised when the command line or the run file cannot be understood (exit code 2)."""
