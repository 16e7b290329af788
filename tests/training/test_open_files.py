"""Many images need many open files: the limit is raised, or the run is refused."""

import resource

import pytest

from tilenet.errors import TilenetError
from tilenet.training.images.open import allow_open_files


@pytest.mark.parametrize(
    ("limits", "count", "wanted"),
    [
        ((256, 4096), 300, 1264),
        ((256, 1000), 900, 1000),
        ((256, resource.RLIM_INFINITY), 5000, 20064),
        ((1264, 4096), 300, None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 10**6, None),
    ],
)
def test_the_limit_is_raised_as_far_as_needed(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], count: int, wanted: int | None
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda what, pair: found.append(pair))
    allow_open_files(count)
    assert found == ([] if wanted is None else [(wanted, limits[1])])


def test_more_files_than_the_system_allows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 1000))
    with pytest.raises(TilenetError, match=r"\(files: 937, the system allows: 1000\)"):
        allow_open_files(937)
