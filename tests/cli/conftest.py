"""Commands that run in the test's own process."""

import pytest
from info_answers import Info


@pytest.fixture
def info(capfd: pytest.CaptureFixture[str]) -> Info:
    return Info(capfd)
