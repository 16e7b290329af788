"""Tiles are divided among ranks by their work: each once, evenly, in few rounds."""

from itertools import pairwise

import numpy as np
import pytest

from tilenet.mapping.writing.tile_shares import share_tiles


@pytest.mark.parametrize("seed", range(40))
def test_each_tile_has_one_rank_and_ranks_work_alike(seed: int) -> None:
    draw = np.random.default_rng(seed)
    ranks, most = (int(draw.integers(1, high)) for high in (40, 17))
    costs = draw.choice([1, 1, 1.6, 5.8, 9.3], draw.integers(1, 2000)).tolist()
    rounds = share_tiles(costs, ranks, most)
    assert all(before[-1] == after[0] for before, after in pairwise(rounds))
    shares = [costs[begin:end] for firsts in rounds for begin, end in pairwise(firsts)]
    assert [cost for share in shares for cost in share] == costs
    assert all(firsts[0] < firsts[-1] for firsts in rounds)
    least_rounds = -(-sum(costs) // (most * ranks))
    assert len(rounds) <= least_rounds
    for share in shares:
        # At most half of its first and half of its last tile belong to its neighbours.
        assert sum(share) - sum(costs) / (least_rounds * ranks) <= max(costs) + 1e-9
        assert len(share) <= most


def test_equal_tiles_are_divided_as_evenly_as_can_be() -> None:
    assert share_tiles([1.0] * 10, 4, 16) == [[0, 2, 5, 7, 10]]
    assert share_tiles([1.0] * 10, 2, 3) == [[0, 2, 5], [5, 7, 10]]
    assert share_tiles([1.0], 3, 8) == [[0, 0, 1, 1]]
    assert share_tiles([], 3, 8) == []
    assert share_tiles([9.3, 1.0], 2, 1) == [[0, 0, 1], [1, 1, 2]]
