"""Ranks on a mesh of replicas × rows × columns, and the tiles of each."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilenet.errors import TilenetError
from tilenet.planning.mesh import MeshShape, RankPlace, choose_mesh, tiles_of

SHAPES = st.builds(MeshShape, st.integers(1, 5), st.integers(1, 6), st.integers(1, 6))


@given(SHAPES)
def test_each_rank_has_its_own_place_and_columns_vary_fastest(shape: MeshShape) -> None:
    axes = range(shape.replicas), range(shape.rows), range(shape.columns)
    places = [shape.place(rank) for rank in range(shape.num_ranks)]
    assert places == [RankPlace(*axis) for axis in product(*axes)]


@given(SHAPES, st.integers(1, 13), st.integers(1, 13))
def test_each_tile_belongs_to_one_rank_of_each_replica(
    shape: MeshShape, rows: int, cols: int
) -> None:
    for replica in range(shape.replicas):
        ranks = [r for r in range(shape.num_ranks) if shape.place(r).replica == replica]
        tiles = [tiles_of(shape.place(rank), shape, (rows, cols)) for rank in ranks]
        assert sorted(tile for share in tiles for tile in share) == list(range(rows * cols))
        # fair along each axis, and a rectangle of neighbours
        for axis, num_ranks in ((0, shape.rows), (1, shape.columns)):
            num_tiles = (rows, cols)[axis]
            for share in tiles:
                along = sorted({divmod(tile, cols)[axis] for tile in share})
                if along:
                    assert along == list(range(along[0], along[-1] + 1))
                    assert num_tiles // num_ranks <= len(along) <= -(-num_tiles // num_ranks)
        for share in tiles:
            rows_of = {tile // cols for tile in share}
            cols_of = {tile % cols for tile in share}
            assert len(share) == len(rows_of) * len(cols_of)


def test_tiles_in_the_same_place_of_replicas_are_the_same() -> None:
    shape = MeshShape(2, 2, 3)
    assert tiles_of(shape.place(4), shape, (5, 7)) == tiles_of(shape.place(10), shape, (5, 7))
    assert tiles_of(RankPlace(0, 1, 0), MeshShape(1, 2, 2), (3, 3)) == (6, 7)


@given(st.integers(1, 200), st.integers(1, 40))
def test_a_mesh_that_is_left_open_always_fits(num_ranks: int, num_images: int) -> None:
    shape = choose_mesh(num_ranks, num_images)
    assert shape.num_ranks == num_ranks
    # as many replicas as divide both ranks and images, the rest as square as can be
    assert shape.replicas == max(
        n for n in range(1, 41) if num_ranks % n == 0 and num_images % n == 0
    )
    rest = num_ranks // shape.replicas
    squarest = min(abs(a - rest // a) for a in range(1, rest + 1) if rest % a == 0)
    assert shape.columns - shape.rows == squarest


OPEN = st.one_of(st.none(), st.integers(1, 8))


@given(st.integers(1, 24), st.integers(1, 6), OPEN, OPEN, OPEN)
def test_what_is_given_is_kept_or_refused_where_no_mesh_has_it(
    num_ranks: int, num_images: int, replicas: int | None, rows: int | None, columns: int | None
) -> None:
    asked = (replicas, rows, columns)
    possible = [
        shape
        for shape in product(range(1, 25), repeat=3)
        if shape[0] * shape[1] * shape[2] == num_ranks
        and all(a is None or a == s for a, s in zip(asked, shape, strict=True))
    ]
    if possible:
        shape = choose_mesh(num_ranks, num_images, replicas, rows, columns)
        assert (shape.replicas, shape.rows, shape.columns) in possible
    else:
        with pytest.raises(TilenetError, match=rf"the number of ranks .*ranks: {num_ranks}\)"):
            choose_mesh(num_ranks, num_images, replicas, rows, columns)


def test_refusals_name_an_axis_without_ranks_or_how_many_to_start() -> None:
    for axis, value in product(("replicas", "rows", "columns"), (0, -2)):
        with pytest.raises(TilenetError, match=rf"at least one rank \(mesh\.{axis}: {value}\)"):
            choose_mesh(4, 1, **{axis: value})
    with pytest.raises(TilenetError, match=r"2 × 3 × 2 = 12, ranks: 8\); start 12 ranks"):
        choose_mesh(8, 1, 2, 3, 2)
