"""The model of a map's finish, against rounds counted by hand."""

from dataclasses import astuple, replace

import pytest

from bench.scale.map_finish import TILE_MPX, Parts, finish

# A tile of each level, 1 GB, takes 1, 2 or 4 s.
COSTS = 1 / TILE_MPX, 2 / TILE_MPX, 4 / TILE_MPX
PARTS = Parts(COSTS, 1e9 / TILE_MPX, receive_s=2, write_s=3, round_s=5, share_s=7)


def test_a_finish_takes_what_its_rounds_add_up_to() -> None:
    # 1 + 4 + 16 tiles in one round: 4 + 2, 3 × 2 + 2 × 1, 7 and 7 s. Of the four ranks the two on
    # the other node hand over a page each, and write the rest of their 14 tiles.
    page_gb = 65536 / 1e9
    found = astuple(finish(PARTS, 2048, 1, ranks=4, node_ranks=2, slower=2))
    writing = (14 - 2 * page_gb) * 3
    assert found == pytest.approx(
        (2 * 8, 2 * page_gb * 2, writing, 5 * 2 + 7 * 2, 21 / writing), rel=1e-12
    )
    # 4 tiles aside; then 1 of them, these 4 copied, 16 and 64; nothing is sent.
    found = astuple(finish(PARTS, 4096, 4 << 20, ranks=1, node_ranks=8))
    assert found == pytest.approx((4 * 4 + 2 + 16 * 2 + 64, 0, 89 * 3, 0, 1 / 3), rel=1e-12)
    # Tiles of 9 kB: three of four ranks hand over all of the 45, 63 and 63 that theirs take.
    small = replace(PARTS, mpx_bytes=9e3 / TILE_MPX)
    found = astuple(finish(small, 2048, 1, ranks=4, node_ranks=1))
    assert found[1:3] == pytest.approx((17.1e-5 * 2, 18.9e-5 * 3), rel=1e-12)
