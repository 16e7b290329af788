"""Curves made short: nothing that a column of pixels shows is lost."""

import numpy as np
import pytest

from tilenet.report.charts import thinned


@pytest.mark.parametrize(("count", "most"), [(1, 10), (10, 10), (11, 10), (997, 50), (5000, 480)])
def test_columns_are_those_of_a_loop(count: int, most: int) -> None:
    rng = np.random.default_rng(count)
    x = np.cumsum(rng.integers(1, 4, count)).astype(float)
    y = rng.normal(size=count)
    y[rng.random(count) < 0.1] = np.nan
    found = thinned(x, y, most)
    kept = [(a, b) for a, b in zip(x, y, strict=True) if np.isfinite(b)]
    if len(kept) <= most:
        wanted = [[pair] for pair in kept]
    else:
        first, last = kept[0][0], kept[-1][0]
        columns: dict[int, list[tuple[float, float]]] = {}
        for a, b in kept:
            place = min(int((a - first) / ((last - first) / most)), most - 1)
            columns.setdefault(place, []).append((a, b))
        wanted = list(columns.values())
    assert len(found.x) == len(wanted) <= most
    assert found.low.tolist() == [min(b for _, b in group) for group in wanted]
    assert found.high.tolist() == [max(b for _, b in group) for group in wanted]
    assert found.x == pytest.approx([np.mean([a for a, _ in group]) for group in wanted])
    assert found.mean == pytest.approx([np.mean([b for _, b in group]) for group in wanted])
