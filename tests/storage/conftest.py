"""What reaches the disk."""

import os

import pytest


@pytest.fixture
def acts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is synced and renamed, in order."""
    seen: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(handle: int) -> None:
        seen.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def noted_replace(old: str, new: str) -> None:
        replace(old, new)
        seen.append(("rename", str(new)))

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    return seen
