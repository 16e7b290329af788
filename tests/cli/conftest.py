"""Commands that run in the test's own process."""

from collections.abc import Callable

import pytest
from info_answers import Info


@pytest.fixture
def info(capfd: pytest.CaptureFixture[str]) -> Info:
    return Info(capfd)


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line in which a command refuses its arguments."""

    def said(main: Callable[[list[str]], int], code: int, *arguments: str) -> str:
        assert main(list(arguments)) == code
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        return printed.err

    return said
