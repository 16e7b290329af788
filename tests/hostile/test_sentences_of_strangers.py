"""A sentence that quotes names and values of strangers is one line of bounded length."""

from tilenet.errors import TilenetError, UsageError, one_line


def test_a_sentence_is_one_line_of_bounded_length() -> None:
    error = TilenetError("rule (\x1b[31m\nred\0\u202e): " + "x" * 10**6 + "; remedy")
    assert str(error).startswith(r"rule (\x1b[31m\nred\x00\u202e): xxx")
    assert str(error).endswith("x; remedy")
    assert len(str(error)) < 1600
    assert one_line("ä × – …") == "ä × – …"
    assert one_line(one_line("\x1b" * 9000)) == one_line("\x1b" * 9000)
    assert str(UsageError("a\rb")) == r"a\rb"
