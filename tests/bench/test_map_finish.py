"""The model of a map's finish, against rounds counted by hand."""

from dataclasses import astuple

from bench.scale.map_finish import TILE_MPX, Parts, finish

# A tile of each level, 1 GB, takes 1, 10 or 100 s.
COSTS = 1 / TILE_MPX, 10 / TILE_MPX, 100 / TILE_MPX
PARTS = Parts(COSTS, 1e9 / TILE_MPX, receive_s=2, write_s=3, round_s=5, share_s=7)


def test_a_finish_takes_what_its_rounds_add_up_to() -> None:
    # 1 + 4 + 16 tiles in one round, 6 per rank; two of four ranks hand over 6 + 3.
    found = astuple(finish(PARTS, 2048, 1, ranks=4, node_ranks=2, slower=2))
    assert [round(one, 6) for one in found] == [
        2 * (100 + 4 * 10 + 1),
        9 * 2,
        21 * 3,
        5 * 2 + 7 * 2,
    ]
    # 4 tiles aside; then 1 of them, these 4 copied, 16 and 64, 8 in a round; nothing is sent.
    found = astuple(finish(PARTS, 4096, 4 << 20, ranks=1, node_ranks=8))
    assert [round(one, 6) for one in found] == [4 * 100 + 10 + 16 * 10 + 64, 0, 89 * 3, 0]
