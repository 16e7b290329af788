"""Operators that make each cell of the same cells, whatever their names: what their dimensions do.

Whatever torch tags as acting on each number alone is known, and operators that work along
dimensions or change how a tensor is seen are known by what they do to dimensions: they may work
along channels, and must leave images, rows and columns in their places.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from tilenet.adoption.calls import Call, Given
from tilenet.adoption.cells import (
    BATCH,
    COLS,
    ROWS,
    Atom,
    Cells,
    Dim,
    Weight,
    merged,
    regroup,
    sizes_of,
    tensors_in,
)
from tilenet.model.cellwise import CONVERT, ITEM, find_operator

__all__ = ["broadcast", "cellwise", "from_map", "reshaped", "to_map"]

Rule = Callable[[Call, Cells, Given], "tuple[Dim, ...] | Cells"]
RULES: dict[str, Rule] = {}
SAME = "contiguous", "clone", "alias", "lift_fresh_copy"


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter what operators of these names do to dimensions."""

    def keep(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return keep


def cellwise(call: Call, given: Given) -> Any:
    """What an operator makes of cells; of several results a list of them.

    Raises:
        TilenetError: It looks around them, or its receptive field is unknown.
    """
    tensors = list(tensors_in(tuple(given.arguments.values())))
    if not tensors:
        number = next(iter(given.arguments.values()), None)
        if call.operator in (*SAME, "detach") and isinstance(number, int | float):
            return number
        raise call.refused("a tensor is made in forward of no map")
    for one in tensors:
        if isinstance(one.source, Weight):
            call.weight(one)
    operator = find_operator(call.target)
    if call.operator in RULES:
        dims = RULES[call.operator](call, tensors[0], given)
    elif operator is not None and torch.Tag.pointwise in operator.tags:
        dims = broadcast(call, tensors)
    elif operator is not None and not any(one.size for one in tensors):
        dims = _of_averages(call, tensors)
    else:
        raise call.refused("the receptive field of this operator is unknown")
    if isinstance(dims, Cells):
        return dims
    if operator is None:
        raise call.refused("this operator cannot be part of a layer")
    return _computed(call, tensors, given.as_step(call), dims)


def _computed(call: Call, tensors: Sequence[Cells], arguments: tuple[Any, ...], dims: Any) -> Any:
    """The result of an operator, of these dimensions; a list of them for several results."""
    maps = [one for one in tensors if one.size]
    sizes = {(one.size, one.whole) for one in maps}
    if len(sizes) > 1:
        shown = " and ".join(sorted(str(one.size) for one in maps))
        raise call.refused("cells of maps of different sizes meet", values=f" of {shown}")
    size, whole = next(iter(sizes), (None, all(one.whole for one in tensors)))
    result = Cells((), size, whole, None, call.target, arguments)
    if not isinstance(call.shape, list):
        return replace(result, dims=dims, floats=call.floats)
    return [
        Cells(part, size, whole, None, ITEM, (result, number), call.floats)
        for number, part in enumerate(dims)
    ]


def broadcast(call: Call, tensors: Sequence[Cells]) -> tuple[Dim, ...]:
    """Dimensions of what acts on each number of tensors that are laid on each other."""
    dims: list[Dim] = []
    for place in range(1, max(len(one.dims) for one in tensors) + 1):
        there = {one.dims[-place] for one in tensors if place <= len(one.dims)} - {()}
        if len(there) > 1:
            raise call.refused("rows, columns, channels or images of maps meet others")
        dims.append(next(iter(there), ()))
    return tuple(reversed(dims))


def _of_averages(call: Call, tensors: Sequence[Cells]) -> tuple[Dim, ...]:
    """Dimensions of any operator's result, of tensors that hold numbers for each image only."""
    if any(BATCH in dim for one in tensors for dim in one.dims[1:]):
        raise call.refused("images are taken together")
    dims: list[Dim] = [() if n == 1 else (n,) for n in call.sizes]
    if any(one.dims and one.dims[0] == (BATCH,) for one in tensors):
        dims[0] = (BATCH,)
    return tuple(dims)


def _alone(call: Call, x: Cells, places: Sequence[int]) -> list[int]:
    """Dimensions that an operator works along, which must be channels."""
    places = sorted(place % len(x.dims) for place in places)
    if any(x.over_cells(place) for place in places):
        raise call.refused("cells are taken together", values=f" along dimensions {places}")
    return places


def _sized(dims: Sequence[Dim], shape: Sequence[int]) -> tuple[Dim, ...]:
    """The same dimensions, with as many channels as a result has."""
    return tuple(
        dim if any(isinstance(one, str) for one in dim) else () if n == 1 else (n,)
        for dim, n in zip(dims, shape, strict=True)
    )


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as",
      "reshape_as")  # fmt: skip
def _view(call: Call, x: Cells, given: Given) -> Cells:
    dims = None if call.target == "view.dtype" else regroup(x, call.sizes)
    if dims is None:
        raise call.refused("a map is reshaped, so that cells change their places")
    return reshaped(x, dims)


def reshaped(x: Cells, dims: tuple[Dim, ...]) -> Cells:
    if dims == x.dims:
        return x
    if x.operator == "reshape.default":
        return reshaped(x.arguments[0], dims)
    return replace(
        x, dims=dims, source=None, operator="reshape.default", arguments=(x, sizes_of(dims))
    )


@rule("permute", "transpose", "movedim", "t", "swapaxes", "numpy_T", "mT")
def _permute(call: Call, x: Cells, given: Given) -> Cells:
    # Which dimension goes where is read off a small tensor.
    target = torch.empty(tuple(range(2, 2 + len(x.dims))), device="meta")
    moved = given.run(call, target).shape
    return permuted(x, tuple(n - 2 for n in moved))


def permuted(x: Cells, order: tuple[int, ...]) -> Cells:
    if x.operator == "permute.default":
        before = x.arguments[1][1:]
        return permuted(x.arguments[0], tuple(before[n] for n in order))
    if order == tuple(range(len(order))):
        return x
    dims = tuple(x.dims[n] for n in order)
    return replace(
        x, dims=dims, source=None, operator="permute.default", arguments=(x, ("list", *order))
    )


@rule(*SAME)
def _same(call: Call, x: Cells, given: Given) -> Cells:
    return x


@rule("to", "_to_copy", "type_as")
def _converted(call: Call, x: Cells, given: Given) -> Cells:
    if not call.floats:
        raise call.refused("numbers change their type")
    return x if x.floats else replace(
        x, source=None, operator=CONVERT, arguments=(x,), floats=True
    )  # fmt: skip


@rule("detach", "ones_like", "zeros_like", "full_like", "hardswish", "log_sigmoid")
def _alike(call: Call, x: Cells, given: Given) -> tuple[Dim, ...]:
    return x.dims


@rule("softmax", "log_softmax", "cumsum", "flip", "roll", "glu", "repeat_interleave")
def _along(call: Call, x: Cells, given: Given) -> tuple[Dim, ...]:
    places = given.places("dim", "dims")
    if not places:
        raise call.refused("cells are taken together")
    _alone(call, x, places)
    return _sized(x.dims, call.sizes)


@rule("layer_norm", "rms_norm")
def _normed(call: Call, x: Cells, given: Given) -> tuple[Dim, ...]:
    _alone(call, x, range(-len(given.value("normalized_shape")), 0))
    return x.dims


@rule("sum", "mean", "amax", "amin", "max", "min", "var", "std", "prod", "logsumexp", "argmax",
      "argmin", "norm", "linalg_vector_norm", "var_mean")  # fmt: skip
def _reduced(call: Call, x: Cells, given: Given) -> Any:
    if isinstance(given.value("other"), Cells):  # the larger of two maps
        return broadcast(call, list(tensors_in(tuple(given.arguments.values()))))
    places = given.places("dim") or range(len(x.dims))
    places = _alone(call, x, places)
    keep = bool(given.value("keepdim"))
    dims = tuple(
        () if place in places else dim
        for place, dim in enumerate(x.dims)
        if keep or place not in places
    )
    return [dims] * len(call.shape) if isinstance(call.shape, list) else dims


@rule("split", "split_with_sizes", "chunk", "unbind", "slice", "select")
def _pieces(call: Call, x: Cells, given: Given) -> Any:
    if call.shape == x.shape:  # all of it
        return x
    place = _alone(call, x, given.places("dim"))[0]
    if call.operator in ("select", "unbind"):
        dims: Any = x.dims[:place] + x.dims[place + 1 :]
        return [dims] * len(call.shape) if call.operator == "unbind" else dims
    if isinstance(call.shape, list):
        return [_sized(x.dims, one) for one in call.shape]
    return _sized(x.dims, call.sizes)


@rule("pad")
def _more_channels(call: Call, x: Cells, given: Given) -> tuple[Dim, ...]:
    pads = given.value("pad")
    _alone(call, x, [-1 - place // 2 for place, n in enumerate(pads) if n])
    return _sized(x.dims, call.sizes)


@rule("batch_norm")
def _standardised(call: Call, x: Cells, given: Given) -> Cells:
    """A weight (1, C, numbers), of which each row is brought to mean 0 and variance 1."""
    running = given.arguments["running_mean"], given.arguments["running_var"]
    if x.dims[0] or any(x.over_cells(n) for n in range(len(x.dims))) or running != (None, None):
        raise call.refused("the operator is applied to what is no map (B, C, H, W)")
    wide = call.sizes[1]
    rows = regroup(x, (wide, prod(call.sizes) // wide))
    assert rows is not None
    y = _step(reshaped(x, rows), "layer_norm.default", ("list", *reshaped(x, rows).shape[1:]),
              None, None, given.value("eps"))  # fmt: skip
    for name, how in (("weight", "mul.Tensor"), ("bias", "add.Tensor")):
        if isinstance(one := given.value(name), Cells):
            y = _step(y, how, reshaped(one, (rows[0], ())))
    return reshaped(y, x.dims)


@rule("_weight_norm")
def _of_length(call: Call, x: Cells, given: Given) -> Cells:
    """A weight whose parts have the lengths that another one says."""
    place, length = int(given.value("dim")), given.value("g")
    parts = [n for n in range(len(x.dims)) if n != place]
    dims = tuple(dim if n == place else () for n, dim in enumerate(x.dims))
    norm = _step(x, "linalg_vector_norm.default", 2, ("list", *parts), True)
    share = _step(length, "div.Tensor", replace(norm, dims=dims))
    return _step(x, "mul.Tensor", replace(share, dims=dims))


def _step(x: Cells, operator: str, *others: Any) -> Cells:
    """What an operator makes of a tensor, of the same dimensions."""
    return replace(x, source=None, operator=operator, arguments=(x, *others))


@rule("cat", "stack")
def _together(call: Call, x: Cells, given: Given) -> tuple[Dim, ...]:
    tensors = list(tensors_in(given.arguments["tensors"]))
    place = given.places("dim")[0] % len(call.sizes)
    if call.operator == "cat":
        for one in tensors:
            _alone(call, one, [place])
        rest = {one.dims[:place] + one.dims[place + 1 :] for one in tensors}
    else:
        rest = {one.dims for one in tensors}
    if len(rest) > 1:
        raise call.refused("rows, columns, channels or images of maps meet others")
    dims = list(next(iter(rest)))
    dims.insert(place, () if call.sizes[place] == 1 else (call.sizes[place],))
    return tuple(dims)


@rule("linear", "matmul", "mm", "bmm")
def _product(call: Call, x: Cells, given: Given) -> tuple[Dim, ...]:
    tensors = list(tensors_in(tuple(given.arguments.values())))
    first, second = tensors[:2]
    if call.operator == "linear":
        _alone(call, first, [-1])
        return (*first.dims[:-1], *_sized([()], call.sizes[-1:]))
    if not any(one.size for one in tensors):
        return _of_averages(call, tensors)
    if all(len(one.dims) > 1 for one in tensors) and not first.over_cells(-1):
        lead = [replace(one, dims=one.dims[:-2]) for one in tensors]
        dims = *broadcast(call, lead), first.dims[-2], second.dims[-1]
        letters = [one for dim in dims for one in dim if isinstance(one, str)]
        if first.dims[-1] == second.dims[-2] and len(set(letters)) == len(letters):
            return dims
    raise call.refused("maps are multiplied as matrices, so that cells are taken together")


@rule("prelu")
def _prelu(call: Call, x: Cells, given: Given) -> tuple[Dim, ...]:
    _alone(call, x, [1])
    return x.dims


@rule("expand", "expand_as", "repeat")
def _repeated(call: Call, x: Cells, given: Given) -> Any:
    """Channels that are repeated, or an average for each cell of a map that is named."""
    other = given.value("other")
    if isinstance(other, Cells) and other.size and not x.size:
        ones = replace(other, source=None, operator="ones_like.default", arguments=(other,))
        dims = broadcast(call, [x, other])
        return replace(ones, dims=dims, operator="mul.Tensor", arguments=(x, ones))
    there = (*[()] * (len(call.sizes) - len(x.dims)), *x.dims)
    wide = reshaped(x, there)
    times = [n // old for n, old in zip(call.sizes, wide.shape, strict=True)]
    if any(n > 1 and wide.over_cells(place) for place, n in enumerate(times)):
        raise call.refused("rows, columns or images are repeated")
    if x.size is None and len(times) == 4 and max(times[2:]) > 1:
        raise call.refused("an average is repeated for each cell other than by resizing")
    if set(times) == {1}:
        return wide
    dims = _sized(wide.dims, call.sizes)
    return replace(
        wide, dims=dims, source=None, operator="repeat.default", arguments=(wide, ("list", *times))
    )


def to_map(x: Cells) -> Cells:
    """The same numbers as a map (B, C, H, W), or (B, C, 1, 1)."""
    atoms = [one for dim in x.dims for one in dim]
    split = permuted(reshaped(x, tuple((one,) for one in atoms)), _map_order(atoms))
    channels = merged([one for one in atoms if isinstance(one, int)])
    spatial: tuple[Dim, Dim] = ((ROWS,), (COLS,)) if x.size else ((), ())
    return reshaped(split, ((BATCH,), channels, *spatial))


def from_map(x: Cells, dims: Sequence[Dim]) -> Cells:
    """A map's numbers in these dimensions again, from which `to_map` made it."""
    atoms = [one for dim in dims for one in dim]
    order = _map_order(atoms)
    split = reshaped(x, tuple((atoms[n],) for n in order))
    back = permuted(split, tuple(order.index(n) for n in range(len(order))))
    return reshaped(back, tuple(dims))


def _map_order(atoms: Sequence[Atom]) -> tuple[int, ...]:
    """Images first, then channels in their order, rows and columns."""
    rank = {BATCH: 0, ROWS: 2, COLS: 3}
    ranks = [rank[one] if isinstance(one, str) else 1 for one in atoms]
    return tuple(sorted(range(len(atoms)), key=ranks.__getitem__))
