"""Searches so small that all layouts can be tried."""

import pytest


@pytest.fixture
def fewer_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilenet.planning.search.FACTORS", (1, 2, 4))
    monkeypatch.setattr("tilenet.planning.search.MICRO_BATCHES", (1, 2, 5))
