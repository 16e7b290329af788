"""The error that is the user's to mend: said in one sentence, without a traceback."""

__all__ = ["AgreedError", "TilenetError", "UsageError", "one_line", "printable"]

MOST_LETTERS = 1500


class _Said(Exception):
    """Its sentence is one line, however long or odd the words that it quotes."""

    def __init__(self, sentence: str = "") -> None:
        super().__init__(one_line(sentence))


class TilenetError(_Said):
    """Raised when a request cannot be carried out: the rule, the values, the remedy.

    Everything else that is raised is a mistake of ours and keeps its traceback.
    """


class AgreedError(TilenetError):
    """Raised on every rank in the same words: each may end by itself, none waits for another."""


class UsageError(_Said):
    """Raised when the command line or the run file cannot be understood (exit code 2)."""


def one_line(text: str) -> str:
    r"""A text as it may stand on a terminal: on one line, of bounded length, no commands to it.

    Names and values come from files of strangers. What cannot be printed is written as Python
    writes it (\n, \x1b); of long texts the beginning and the end stay, where rule and remedy are.
    """
    return _cut(printable(_cut(text, 2 * MOST_LETTERS)), MOST_LETTERS)


def printable(text: str) -> str:
    r"""A text with all that cannot be printed as Python writes it (\n, \x1b), however long."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most * 2 // 3]} … {text[-most // 4 :]}"
