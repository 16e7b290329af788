"""An alarm for tests of what could be waited for."""

import signal
from typing import Any

import pytest


@pytest.fixture
def in_time() -> Any:
    """Whoever waits for a pipe fails."""

    def late(signum: int, frame: Any) -> None:
        raise AssertionError("waited")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
