"""Operators that compute each cell from the same cells of their arguments.

Whatever torch tags as acting on each number alone is known, and operators that work along
dimensions or change a tensor's view are known by their effect on dimensions: they may work along
channels, and must leave images, rows and columns in their places.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from tilenet.adoption.calls import NO_MAP, Arguments, Call
from tilenet.adoption.cells import (
    BATCH,
    COLS,
    ROWS,
    Atom,
    Cells,
    Dim,
    Weight,
    applied,
    merged,
    regroup,
    sizes_of,
    tensors_in,
)
from tilenet.model.cellwise import CONVERT, ITEM, find_operator

Rule = Callable[[Call, Cells, Arguments], "tuple[Dim, ...] | Cells"]
RULES: dict[str, Rule] = {}
SAME = "contiguous", "clone", "alias", "lift_fresh_copy"


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function for operators of these names."""

    def keep(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return keep


def cellwise(call: Call, args: Arguments) -> Any:
    """The result of an operator on cells; a list where there are several.

    Raises:
        TilenetError: It looks around the cells, or its receptive field is unknown.
    """
    tensors = list(tensors_in(tuple(args.by_name.values())))
    if not tensors:
        number = next(iter(args.by_name.values()), None)
        if call.operator in (*SAME, "detach") and isinstance(number, int | float):
            return number
        raise call.refused(NO_MAP)
    for tensor in tensors:
        if isinstance(tensor.source, Weight):
            call.weight(tensor)
    operator = find_operator(call.target)
    if call.operator in RULES:
        dims = RULES[call.operator](call, tensors[0], args)
    elif operator is not None and torch.Tag.pointwise in operator.tags:
        dims = broadcast(call, tensors)
    elif operator is not None and not any(tensor.size for tensor in tensors):
        dims = _of_averages(call, tensors)
    else:
        raise call.refused("the receptive field of this operator is unknown")
    if isinstance(dims, Cells):
        return dims
    if operator is None:
        raise call.refused("this operator cannot be part of a layer")
    return _computed(call, tensors, args.as_step(call), dims)


def _computed(call: Call, tensors: Sequence[Cells], arguments: tuple[Any, ...], dims: Any) -> Any:
    """The result of an operator, of these dimensions; a list of them for several results."""
    maps = [tensor for tensor in tensors if tensor.size]
    sizes = {(tensor.size, tensor.whole) for tensor in maps}
    if len(sizes) > 1:
        listing = " and ".join(sorted(str(tensor.size) for tensor in maps))
        raise call.refused("cells of maps of different sizes meet", values=f" of {listing}")
    size, whole = next(iter(sizes), (None, all(tensor.whole for tensor in tensors)))
    result = Cells((), size, whole, None, call.target, arguments)
    if not isinstance(call.shape, list):
        return replace(result, dims=dims, floats=call.floats)
    return [
        Cells(part, size, whole, None, ITEM, (result, number), call.floats)
        for number, part in enumerate(dims)
    ]


def broadcast(call: Call, tensors: Sequence[Cells]) -> tuple[Dim, ...]:
    """Return the dimensions of the result of an operator that broadcasts its tensors."""
    dims: list[Dim] = []
    for place in range(1, max(len(tensor.dims) for tensor in tensors) + 1):
        present = {tensor.dims[-place] for tensor in tensors if place <= len(tensor.dims)} - {()}
        if len(present) > 1:
            raise call.refused("rows, columns, channels or images of maps meet others")
        dims.append(next(iter(present), ()))
    return tuple(reversed(dims))


def _of_averages(call: Call, tensors: Sequence[Cells]) -> tuple[Dim, ...]:
    """Dimensions of any operator's result, of tensors that hold numbers for each image only."""
    if any(BATCH in dim for tensor in tensors for dim in tensor.dims[1:]):
        raise call.refused("images are taken together")
    dims: list[Dim] = [() if n == 1 else (n,) for n in call.sizes]
    if any(tensor.dims and tensor.dims[0] == (BATCH,) for tensor in tensors):
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
        dim if any(isinstance(atom, str) for atom in dim) else () if n == 1 else (n,)
        for dim, n in zip(dims, shape, strict=True)
    )


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as",
      "reshape_as")  # fmt: skip
def _view(call: Call, x: Cells, args: Arguments) -> Cells:
    dims = None if call.target == "view.dtype" else regroup(x, call.sizes)
    if dims is None:
        raise call.refused("a map is reshaped, so that cells change their places")
    return reshaped(x, dims)


def reshaped(x: Cells, dims: tuple[Dim, ...]) -> Cells:
    if dims == x.dims:
        return x
    if x.operator == "reshape.default":
        return reshaped(x.arguments[0], dims)
    return applied("reshape.default", x, x, sizes_of(dims), dims=dims)


@rule("permute", "transpose", "movedim", "t", "swapaxes", "numpy_T", "mT")
def _permute(call: Call, x: Cells, args: Arguments) -> Cells:
    # Which dimension goes where is read off a small tensor.
    target = torch.empty(tuple(range(2, 2 + len(x.dims))), device="meta")
    moved = args.run(call, target).shape
    return permuted(x, tuple(n - 2 for n in moved))


def permuted(x: Cells, order: tuple[int, ...]) -> Cells:
    if x.operator == "permute.default":
        before = x.arguments[1][1:]
        return permuted(x.arguments[0], tuple(before[n] for n in order))
    if order == tuple(range(len(order))):
        return x
    dims = tuple(x.dims[n] for n in order)
    return applied("permute.default", x, x, ("list", *order), dims=dims)


@rule(*SAME)
def _same(call: Call, x: Cells, args: Arguments) -> Cells:
    return x


@rule("to", "_to_copy", "type_as")
def _converted(call: Call, x: Cells, args: Arguments) -> Cells:
    if not call.floats:
        raise call.refused("numbers change their type")
    return x if x.floats else applied(CONVERT, x, x, floats=True)


@rule("detach", "ones_like", "zeros_like", "full_like", "hardswish", "log_sigmoid")
def _alike(call: Call, x: Cells, args: Arguments) -> tuple[Dim, ...]:
    return x.dims


@rule("softmax", "log_softmax", "cumsum", "flip", "roll", "glu", "repeat_interleave")
def _along(call: Call, x: Cells, args: Arguments) -> tuple[Dim, ...]:
    places = args.places("dim", "dims")
    if not places:
        raise call.refused("cells are taken together")
    _alone(call, x, places)
    return _sized(x.dims, call.sizes)


@rule("layer_norm", "rms_norm")
def _normed(call: Call, x: Cells, args: Arguments) -> tuple[Dim, ...]:
    _alone(call, x, range(-len(args.value("normalized_shape")), 0))
    return x.dims


@rule("sum", "mean", "amax", "amin", "max", "min", "var", "std", "prod", "logsumexp", "argmax",
      "argmin", "norm", "linalg_vector_norm", "var_mean")  # fmt: skip
def _reduced(call: Call, x: Cells, args: Arguments) -> Any:
    if isinstance(args.value("other"), Cells):  # the larger of two maps
        return broadcast(call, list(tensors_in(tuple(args.by_name.values()))))
    places = args.places("dim") or range(len(x.dims))
    places = _alone(call, x, places)
    keep = bool(args.value("keepdim"))
    dims = tuple(
        () if place in places else dim
        for place, dim in enumerate(x.dims)
        if keep or place not in places
    )
    return [dims] * len(call.shape) if isinstance(call.shape, list) else dims


@rule("split", "split_with_sizes", "chunk", "unbind", "slice", "select")
def _pieces(call: Call, x: Cells, args: Arguments) -> Any:
    if call.shape == x.shape:  # all of it
        return x
    place = _alone(call, x, args.places("dim"))[0]
    if call.operator in ("select", "unbind"):
        dims: Any = x.dims[:place] + x.dims[place + 1 :]
        return [dims] * len(call.shape) if call.operator == "unbind" else dims
    if isinstance(call.shape, list):
        return [_sized(x.dims, shape) for shape in call.shape]
    return _sized(x.dims, call.sizes)


@rule("pad")
def _more_channels(call: Call, x: Cells, args: Arguments) -> tuple[Dim, ...]:
    pads = args.value("pad")
    _alone(call, x, [-1 - place // 2 for place, n in enumerate(pads) if n])
    return _sized(x.dims, call.sizes)


@rule("batch_norm")
def _standardised(call: Call, x: Cells, args: Arguments) -> Cells:
    """Standardise each row of a weight (1, C, numbers) to mean 0 and variance 1."""
    running = args.by_name["running_mean"], args.by_name["running_var"]
    if x.dims[0] or any(x.over_cells(n) for n in range(len(x.dims))) or running != (None, None):
        raise call.refused("the operator is applied to a tensor that is not a map (B, C, H, W)")
    wide = call.sizes[1]
    rows = regroup(x, (wide, prod(call.sizes) // wide))
    assert rows is not None
    y = reshaped(x, rows)
    y = applied("layer_norm.default", y, y, ("list", *y.shape[1:]), None, None, args.value("eps"))
    for name, how in (("weight", "mul.Tensor"), ("bias", "add.Tensor")):
        if isinstance(weight := args.value(name), Cells):
            y = applied(how, y, y, reshaped(weight, (rows[0], ())))
    return reshaped(y, x.dims)


@rule("_weight_norm")
def _of_length(call: Call, x: Cells, args: Arguments) -> Cells:
    """Scale the parts of a weight to the lengths that another weight holds."""
    place, length = int(args.value("dim")), args.value("g")
    parts = [n for n in range(len(x.dims)) if n != place]
    dims = tuple(dim if n == place else () for n, dim in enumerate(x.dims))
    norm = applied("linalg_vector_norm.default", x, x, 2, ("list", *parts), True)
    share = applied("div.Tensor", length, length, replace(norm, dims=dims))
    return applied("mul.Tensor", x, x, replace(share, dims=dims))


@rule("cat", "stack")
def _together(call: Call, x: Cells, args: Arguments) -> tuple[Dim, ...]:
    tensors = list(tensors_in(args.by_name["tensors"]))
    place = args.places("dim")[0] % len(call.sizes)
    if call.operator == "cat":
        for tensor in tensors:
            _alone(call, tensor, [place])
        rest = {tensor.dims[:place] + tensor.dims[place + 1 :] for tensor in tensors}
    else:
        rest = {tensor.dims for tensor in tensors}
    if len(rest) > 1:
        raise call.refused("rows, columns, channels or images of maps meet others")
    dims = list(next(iter(rest)))
    dims.insert(place, () if call.sizes[place] == 1 else (call.sizes[place],))
    return tuple(dims)


@rule("linear", "matmul", "mm", "bmm")
def _product(call: Call, x: Cells, args: Arguments) -> tuple[Dim, ...]:
    tensors = list(tensors_in(tuple(args.by_name.values())))
    first, second = tensors[:2]
    if call.operator == "linear":
        _alone(call, first, [-1])
        return (*first.dims[:-1], *_sized([()], call.sizes[-1:]))
    if not any(tensor.size for tensor in tensors):
        return _of_averages(call, tensors)
    if all(len(tensor.dims) > 1 for tensor in tensors) and not first.over_cells(-1):
        lead = [replace(tensor, dims=tensor.dims[:-2]) for tensor in tensors]
        dims = *broadcast(call, lead), first.dims[-2], second.dims[-1]
        letters = [atom for dim in dims for atom in dim if isinstance(atom, str)]
        if first.dims[-1] == second.dims[-2] and len(set(letters)) == len(letters):
            return dims
    raise call.refused("maps are multiplied as matrices, so that cells are taken together")


@rule("prelu")
def _prelu(call: Call, x: Cells, args: Arguments) -> tuple[Dim, ...]:
    _alone(call, x, [1])
    return x.dims


@rule("expand", "expand_as", "repeat")
def _repeated(call: Call, x: Cells, args: Arguments) -> Any:
    """Channels that are repeated, or an average for each cell of a map that is named."""
    other = args.value("other")
    if isinstance(other, Cells) and other.size and not x.size:
        ones = applied("ones_like.default", other, other)
        return applied("mul.Tensor", ones, x, ones, dims=broadcast(call, [x, other]))
    padded_dims = (*[()] * (len(call.sizes) - len(x.dims)), *x.dims)
    wide = reshaped(x, padded_dims)
    times = [n // old for n, old in zip(call.sizes, wide.shape, strict=True)]
    if any(n > 1 and wide.over_cells(place) for place, n in enumerate(times)):
        raise call.refused("rows, columns or images are repeated")
    if x.size is None and len(times) == 4 and max(times[2:]) > 1:
        raise call.refused("an average is repeated for each cell other than by resizing")
    if set(times) == {1}:
        return wide
    dims = _sized(wide.dims, call.sizes)
    return applied("repeat.default", wide, wide, ("list", *times), dims=dims)


def to_map(x: Cells) -> Cells:
    """The same numbers as a map (B, C, H, W), or (B, C, 1, 1)."""
    atoms = [atom for dim in x.dims for atom in dim]
    split = permuted(reshaped(x, tuple((atom,) for atom in atoms)), _map_order(atoms))
    channels = merged([atom for atom in atoms if isinstance(atom, int)])
    spatial: tuple[Dim, Dim] = ((ROWS,), (COLS,)) if x.size else ((), ())
    return reshaped(split, ((BATCH,), channels, *spatial))


def from_map(x: Cells, dims: Sequence[Dim]) -> Cells:
    """The inverse of `to_map`: a map's numbers in these dimensions."""
    atoms = [atom for dim in dims for atom in dim]
    order = _map_order(atoms)
    split = reshaped(x, tuple((atoms[n],) for n in order))
    back = permuted(split, tuple(order.index(n) for n in range(len(order))))
    return reshaped(back, tuple(dims))


def _map_order(atoms: Sequence[Atom]) -> tuple[int, ...]:
    """Images first, then channels in their order, rows and columns."""
    rank = {BATCH: 0, ROWS: 2, COLS: 3}
    ranks = [rank[atom] if isinstance(atom, str) else 1 for atom in atoms]
    return tuple(sorted(range(len(atoms)), key=ranks.__getitem__))
