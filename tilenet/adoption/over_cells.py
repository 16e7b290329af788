"""Operators that take all cells of the image together: means, sums, maxima, and softmax over them.

Each is a sum or a maximum over the whole image, of maps that are computed cell by cell.
"""

from typing import Any

from tilenet.adoption.calls import Call, operator
from tilenet.adoption.cells import COLS, ROWS, Cells, applied, cells_of
from tilenet.adoption.cellwise import broadcast, from_map, reshaped, to_map
from tilenet.adoption.values import Value
from tilenet.geometry.layers import GlobalPool

TINY = 1e-36  # the square of a number that is as good as 0


@operator("mean")
def _mean(call: Call, x: Any, dim: list[int] | None = None, keepdim: bool = False) -> Any:
    return over_cells(call, call.cells(x), dim or [], keep=keepdim)


def over_cells(
    call: Call,
    cells: Cells,
    dim: list[int],
    *,
    keep: bool,
    takes: Any = "mean",
    shared: bool = False,
) -> Any:
    """A mean, a sum or a maximum over all rows and columns, in whatever dimensions they are."""
    places = {place % len(cells.dims) for place in dim}
    letters = sorted(atom for n in places for atom in cells.dims[n] if isinstance(atom, str))
    if not letters:
        return NotImplemented
    if letters != ["H", "W"] or any(isinstance(a, int) for n in places for a in cells.dims[n]):
        raise call.refused(f"a {takes} is taken over other dimensions than rows and columns")
    value = call.map_of(to_map(cells))
    layer = GlobalPool(value.channels, value.channels, 1, takes, shared)
    pooled = Value(value.channels, (1, 1), True, layer, (value,))
    dims = [
        () if n in places else part for n, part in enumerate(cells.dims) if keep or n not in places
    ]
    return from_map(cells_of(call.entered(pooled)), dims)


@operator("amax")
def _largest(call: Call, x: Any, dim: list[int] | None = None, keepdim: bool = False) -> Any:
    cells = call.cells(x)
    return over_cells(call, cells, dim or [], keep=keepdim, takes="maximum", shared=True)


@operator("adaptive_max_pool2d")
def _adaptive_maximum(call: Call, x: Any, output_size: list[int]) -> list[Any]:
    """The largest value, and where it is."""
    if set(output_size) != {1}:
        raise call.refused("maxima are taken of parts of the image", values=f" {output_size}")
    cells = call.cells(x)
    if [atom for part in cells.dims for atom in part if atom in (ROWS, COLS)] == [COLS, ROWS]:
        raise call.refused("the first of equal maxima is found column by column")
    largest = over_cells(call, cells, [2, 3], keep=True, takes="maximum")
    return [largest, call.refused("the place of a maximum is taken")]


@operator("linalg_vector_norm", "norm")
def _length(
    call: Call, x: Any, ord: Any = 2, p: Any = 2, dim: Any = None, keepdim: bool = False
) -> Any:
    """The root of a sum of squares over all cells."""
    cells = call.cells(x)
    dim = [dim] if isinstance(dim, int) else list(dim or [])
    if (ord, p) != (2, 2) or not any(cells.over_cells(place) for place in dim):
        return NotImplemented
    squares = applied("mul.Tensor", cells, cells, cells)
    total = over_cells(call, squares, dim, keep=keepdim, takes="sum")
    # Of zeros alone the root has no gradient; torch takes 0.
    root = applied("sqrt.default", total, applied("clamp.default", total, total, TINY))
    none = applied("le.Scalar", total, total, 0.0, floats=False)
    return applied("masked_fill.Scalar", root, root, none, 0.0)


@operator("softmax")
def _softmax(call: Call, x: Any, dim: int) -> Any:
    """Shares of a sum over all cells, of exponentials that are 1 at the most."""
    cells = call.cells(x)
    if set(cells.dims[dim]) != {ROWS, COLS}:
        return NotImplemented
    largest = over_cells(call, cells, [dim], keep=True, takes="maximum")
    fixed = applied("detach.default", largest, largest)
    powers = applied("exp.default", cells, applied("sub.Tensor", cells, cells, fixed))
    total = over_cells(call, powers, [dim], keep=True, takes="sum")
    return applied("div.Tensor", cells, powers, total)


@operator("matmul", "bmm")
def _product(call: Call, x: Any, other: Any = None, mat2: Any = None) -> Any:
    """Sums over all cells of the products of two maps' channels."""
    first, second = call.cells(x), call.cells(mat2 if other is None else other)
    shared = first.dims[-1]
    if set(shared) != {ROWS, COLS} or second.dims[-2:-1] != (shared,):
        return NotImplemented
    rows = reshaped(first, (*first.dims, ()))
    cols = reshaped(second, (*second.dims[:-2], (), *second.dims[-2:]))
    dims = broadcast(call, [rows, cols])
    products = applied("mul.Tensor", rows, rows, cols, dims=dims)
    return over_cells(call, products, [-2], keep=False, takes="sum")
