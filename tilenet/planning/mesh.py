"""Lay the ranks out as replicas × rows × columns, and give each its tiles."""

from dataclasses import dataclass
from math import gcd, isqrt

from tilenet.errors import TilenetError


@dataclass(frozen=True)
class RankPlace:
    """A rank's coordinates in the mesh."""

    replica: int
    row: int
    col: int


@dataclass(frozen=True)
class MeshShape:
    """Ranks as replicas × rows × columns; columns vary fastest.

    Attributes:
        replicas: Groups of ranks that each hold one image of the step.
        rows: Ranks along an image's rows.
        columns: Ranks along an image's columns.
    """

    replicas: int
    rows: int
    columns: int

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the mesh."""
        return self.replicas * self.rows * self.columns

    def same_image(self, rank: int) -> list[int]:
        """The ranks that hold the same image as `rank`, row by row of the grid."""
        size = self.rows * self.columns
        first = rank // size * size
        return list(range(first, first + size))

    def place(self, rank: int) -> RankPlace:
        """Return the place of a rank."""
        rest, col = divmod(rank, self.columns)
        replica, row = divmod(rest, self.rows)
        return RankPlace(replica, row, col)


def choose_mesh(
    num_ranks: int,
    num_images: int,
    replicas: int | None = None,
    rows: int | None = None,
    columns: int | None = None,
) -> MeshShape:
    """Complete the mesh that the user asked for, in part or not at all.

    Replicas are the cheapest axis (no halo is computed twice), so a step of several images gets
    as many as divide both; the other ranks become a grid as square as possible.

    Raises:
        TilenetError: The axes do not multiply to the number of ranks.
    """
    axes = {"replicas": replicas, "rows": rows, "columns": columns}
    for name, value in axes.items():
        if value is not None and value < 1:
            raise TilenetError(f"a mesh axis has at least one rank (mesh.{name}: {value})")
    if replicas is None:
        fixed = (rows or 1) * (columns or 1)
        replicas = gcd(num_ranks // fixed, num_images) if num_ranks % fixed == 0 else 1
        if rows is not None and columns is not None and num_ranks % fixed == 0:
            replicas = num_ranks // fixed
    left = num_ranks // replicas
    if rows is None and columns is None:
        rows = max(side for side in range(1, isqrt(max(left, 1)) + 1) if left % side == 0)
    if rows is None:
        assert columns is not None
        rows = max(left // columns, 1)
    if columns is None:
        columns = max(left // rows, 1)
    shape = MeshShape(replicas, rows, columns)
    if shape.num_ranks != num_ranks:
        raise TilenetError(
            f"replicas × rows × columns must be the number of ranks (mesh: {replicas} × {rows} × "
            f"{columns} = {shape.num_ranks}, ranks: {num_ranks}); start {shape.num_ranks} ranks or "
            "leave the mesh out"
        )
    return shape


def tiles_of(place: RankPlace, shape: MeshShape, grid: tuple[int, int]) -> tuple[int, ...]:
    """Numbers of the tiles (counted row by row) that a rank of a replica computes.

    Neighbouring tiles go to the same rank. With fewer tiles than ranks some ranks get none.
    """
    rows, cols = grid
    return tuple(
        row * cols + col
        for row in range(rows)
        for col in range(cols)
        if row * shape.rows // rows == place.row and col * shape.columns // cols == place.col
    )


def most_tiles(shape: MeshShape, grid: tuple[int, int]) -> int:
    """Tiles of an image on the rank that has most of them."""
    return -(-grid[0] // shape.rows) * -(-grid[1] // shape.columns)
