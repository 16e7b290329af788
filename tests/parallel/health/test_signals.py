"""Signals that ask for a stop: caught, agreed on, or handed back to whom they were for."""

import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tilenet.parallel.health.signals import SIGNALS, StopRequests, handlers_come_back


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Numbers of the signals that came to who caught them before."""
    numbers: list[int] = []
    before = {n: signal.signal(n, lambda number, frame: numbers.append(number)) for n in SIGNALS}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_what_came_before_a_release_is_heard_after_it(heard: list[int], number: int) -> None:
    with StopRequests() as requests:
        signal.raise_signal(number)
        assert requests.requested
        assert heard == []
        requests.release()
        assert heard == [number]
        signal.raise_signal(number)
        assert heard == [number, number]


@pytest.mark.parametrize("how", ["finished", "agreed", "released", "failed", "failed, agreed"])
def test_signals_are_ignored_at_the_end_unless_an_error_is_raised(
    heard: list[int], how: str
) -> None:
    with handlers_come_back():
        with suppress(ZeroDivisionError), StopRequests() as requests:
            signal.raise_signal(signal.SIGTERM)
            requests.agreed = "agreed" in how
            if how == "released":
                requests.release()
                heard.clear()
            assert not ("failed" in how and 1 / 0)
        assert heard == []
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1] * (how in ("released", "failed"))
    heard.clear()
    signal.raise_signal(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]
