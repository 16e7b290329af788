"""Copies to and from Intel's GPUs go over streams of their own, by torch.xpu, in the same order."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilenet.parallel.sums.own_streams import OwnStreams
from tilenet.parallel.swap.copies import CopyStreams

XPU = torch.device("xpu", 1)


class Stream:
    """A stream of torch.xpu; notes what is queued on it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.append(f"{self.name} has an event")
        return f"event of {self.name}"

    def synchronize(self) -> None:
        self.log.append(f"the host waits for {self.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch.xpu is asked for, and which stream is the current one when values are copied."""
    lines: list[str] = []
    names = iter(("first", "second"))
    current = [Stream("computing", lines)]

    def make(device: torch.device) -> Stream:
        assert device == XPU
        return Stream(next(names), lines)

    @contextmanager
    def use(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    class Values(SimpleNamespace):
        def copy_(self, other: object, *, non_blocking: bool) -> None:
            assert non_blocking
            lines.append(f"{current[-1].name} copies")

    monkeypatch.setattr(torch.xpu, "Stream", make)
    monkeypatch.setattr(torch.xpu, "stream", use)
    monkeypatch.setattr(torch.xpu, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch, "empty", lambda *_, **options: Values(**options, shape=(7,)))
    return lines


def test_a_copy_out_waits_for_the_values_and_is_beside_the_computation(log: list[str]) -> None:
    flat, host = torch.empty(7, device=XPU), torch.empty(7)
    sent: Any = CopyStreams().send(flat, host)
    assert sent == "event of first"
    assert log == ["first waits for computing", "first copies", "first has an event"]


def test_a_copy_back_waits_for_the_memory_and_for_the_copy_out(log: list[str]) -> None:
    sent: Any = "event of another"
    flat, arrival = CopyStreams().fetch(torch.empty(7), XPU, sent)
    assert log == [
        "second waits for computing",
        "second waits for event of another",
        "second copies",
        "second has an event",
    ]
    assert flat.device == XPU
    assert arrival is not None
    log.clear()
    arrival.before_use(flat)
    arrival.before_drop()
    assert log == ["computing waits for event of second"] * 2


def test_sums_wait_for_copies_on_a_stream_of_their_own(log: list[str]) -> None:
    with OwnStreams().of(XPU):
        torch.empty(7).copy_(torch.empty(7), non_blocking=True)
    assert log == ["first copies", "the host waits for first"]
