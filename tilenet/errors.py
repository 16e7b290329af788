"""Errors that a user can correct: each is one sentence, shown without a traceback."""

from collections.abc import Sequence

MOST_LETTERS = 1500


class _OneSentence(Exception):
    """An exception with one line of bounded length as its text, whatever values it quotes."""

    def __init__(self, sentence: str = "") -> None:
        super().__init__(one_line(sentence))


class TilenetError(_OneSentence):
    """Raised when a request cannot be carried out; names the rule, the values and the remedy.

    All other exceptions are bugs of tilenet and keep their traceback.
    """


class AgreedError(TilenetError):
    """Raised on every rank with the same sentence, so each rank can end without the others."""


class UsageError(_OneSentence):
    """Raised when the command line or the run file cannot be understood (exit code 2)."""


def one_line(text: str) -> str:
    r"""A text that is safe on a terminal: one line of bounded length, without control characters.

    Names and values come from files that the user may not have written. Characters that cannot be
    printed are escaped as in Python (\n, \x1b). A long text keeps its beginning and its end, which
    hold the rule and the remedy.
    """
    return _cut(printable(_cut(text, 2 * MOST_LETTERS)), MOST_LETTERS)


def printable(text: str) -> str:
    r"""Escape unprintable characters as in Python (\n, \x1b) in a text of any length."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def and_more(names: Sequence[str], most: int = 1) -> str:
    """The first of some names, and how many there are besides: `a.tif and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most * 2 // 3]} … {text[-most // 4 :]}"
