"""Layers that compute each cell from the same cells of maps, with operators of torch in a list.

A file may hold any list. So operators are allowed by their schema (torch's own tag of operators
that act on each number alone, without random numbers and without writing over anything) or by name,
and a list runs on shapes alone before it runs on anything else.
"""

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tilenet.errors import TilenetError
from tilenet.geometry.layers import Cellwise, Conv, Step
from tilenet.model.gpipe import pop, skippable

# Operators that act on channels, or only change how a tensor is seen.
BY_NAME = frozenset({
    "amax", "amin", "argmax", "argmin", "bmm", "cat", "chunk", "conv1d", "conv2d", "cumsum",
    "detach", "flip", "full_like", "glu", "hardswish", "index_select", "layer_norm",
    "linalg_vector_norm", "linear", "log_sigmoid", "log_softmax", "logsumexp", "matmul", "max",
    "mean", "min", "mm", "norm", "ones_like", "pad", "permute", "prelu", "prod", "repeat",
    "repeat_interleave", "reshape", "rms_norm", "roll", "select", "slice", "softmax", "split",
    "split_with_sizes", "stack", "std", "sum", "unbind", "var", "var_mean", "zeros_like",
})  # fmt: skip
VIEWS = frozenset({
    "chunk", "detach", "item", "permute", "reshape", "select", "slice", "split",
    "split_with_sizes", "unbind",
})  # fmt: skip
# One of several results; numbers as the map's; numbers and their shape.
ITEM, CONVERT, CONSTANT = "item", "convert", "constant"
MOST_NUMBERS = 2**26  # of a value computed from the few cells of a check


@lru_cache(maxsize=1024)
def find_operator(name: str) -> Any:
    """The operator of torch of a name such as `mul.Tensor`, if it may act on cells; else None."""
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None) if base.isidentifier() else None
    operator = getattr(packet, overload, None) if packet and overload.isidentifier() else None
    if not isinstance(operator, torch._ops.OpOverload) or operator._schema.is_mutable:
        return None
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return None
    return operator if torch.Tag.pointwise in operator.tags or base in BY_NAME else None


class CellwiseModule(nn.Module):
    """A `geometry.layers.Cellwise` of one map, (B, C, H, W) in and out."""

    def __init__(self, layer: Cellwise) -> None:
        super().__init__()
        self.layer = layer
        hold_weights(self, layer)
        self._last, self._copies = _last_uses(layer), _is_view(layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, [])

    def compute(self, x: Tensor, stashed: Sequence[Tensor]) -> Tensor:
        """The layer's map, of the map and the stashed ones."""
        layer = self.layer
        maps = [*stashed[: layer.place], x, *stashed[layer.place :]]
        weights = [getattr(self, name) for name, _, _ in layer.weights]
        y = _computed(layer, maps, weights, self._last)
        if self._copies:  # a part of a map would keep all of it
            y = y.clone(memory_format=torch.contiguous_format)
        # Backward reaches each map that is handed on, for which torchgpipe waits.
        alone = y.requires_grad and not stashed
        return y if alone else Tied.apply(y, *maps)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        return ", ".join(str(step[0]) for step in self.layer.steps)


class _CellwiseJoin(CellwiseModule):
    """The same of stashed maps too."""

    def forward(self, x: Tensor) -> Generator[Any, Tensor, Tensor]:  # type: ignore[override]
        maps: list[Tensor] = []
        for name in self.layer.kept:
            stashed = yield pop(name)
            maps.append(stashed)
        return self.compute(x, maps)


class Tied(torch.autograd.Function):
    """A map that is tied to other maps, which get no gradient from it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *maps: Tensor) -> Tensor:
        ctx.num_maps = len(maps)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], *(None for _ in range(ctx.num_maps))


def cellwise_layer(layer: Cellwise) -> nn.Module:
    """The module of a layer, which receives the stashed maps of its names.

    Raises:
        TilenetError: Its operators are not known, or do not make such a map.
    """
    _check(layer)
    if not layer.kept:
        return CellwiseModule(layer)
    module: nn.Module = skippable(pop=layer.names)(_CellwiseJoin)(layer)
    return module


def hold_weights(module: nn.Module, layer: Cellwise | Conv) -> None:
    """Register the weights that a layer computes with."""
    for name, shape, trained in layer.weights:
        values = torch.zeros(shape)
        if trained:
            module.register_parameter(name, nn.Parameter(values))
        else:
            module.register_buffer(name, values)


def kernel_of(layer: Conv, module: nn.Module, like: Tensor) -> Tensor:
    """Return the kernel of a convolution, computed from the weights that a module holds for it.

    Args:
        like: Tensor with the dtype and the device of numbers where there are no weights.
    """
    if not layer.steps:
        kernel: Tensor = module.get_parameter("weight")
        return kernel
    weights = [getattr(module, name) for name, _, _ in layer.weights]
    like = next(iter(weights), like)
    return _run(layer.steps, weights, {}, like, _last_uses(layer))


def taps_of(layer: Conv) -> tuple[tuple[int, int], ...]:
    """Return the row and column of the 1 in each kernel of a convolution that only moves cells.

    All its channels are convolved apart with the same kernels, of one `True` each. Others have
    none: a module's own kernel of one 1 makes NaN of 0 · ∞.
    """
    steps = layer.steps
    repeat = "repeat.default", ("value", 0), ("list", layer.groups, 1, 1, 1)
    alike = steps[1:] in ((), (repeat,)) and layer.groups == layer.in_channels
    if not steps or steps[0][0] != CONSTANT or not alike or layer.bias or layer.edge != "zeros":
        return ()
    *_, height, width = layer.kernel_shape
    cells, numbers = height * width, steps[0][1][1:]
    if not all(isinstance(number, bool) for number in numbers):
        return ()
    kernels = [numbers[n : n + cells] for n in range(0, len(numbers), cells)]
    if len(kernels) * layer.groups != layer.out_channels or not all(
        len(kernel) == cells and kernel.count(True) == 1 for kernel in kernels
    ):
        return ()
    return tuple(divmod(kernel.index(True), width) for kernel in kernels)


def _computed(
    layer: Cellwise, maps: list[Tensor], weights: list[Tensor], last: tuple[tuple[int, ...], ...]
) -> Tensor:
    cells = next((x for n, x in enumerate(maps) if n not in layer.single), maps[0])
    sizes = dict(zip("BHW", (cells.shape[0], *cells.shape[2:]), strict=True))
    return _run(layer.steps, [*maps, *weights], sizes, maps[0], last)


def _run(
    steps: tuple[Step, ...],
    values: list[Any],
    sizes: dict[str, int],
    like: Tensor,
    last: tuple[tuple[int, ...], ...],
) -> Tensor:
    """The last value; numbers have the precision and the device of `like`."""
    for (name, *arguments), done in zip(steps, last, strict=True):
        args = [_resolve(a, values, sizes) for a in arguments if not _is_named(a)]
        kwargs = {a[1]: _resolve(a[2], values, sizes) for a in arguments if _is_named(a)}
        if name == ITEM:
            values.append(args[0][args[1]])
        elif name == CONVERT:
            values.append(args[0].to(like.dtype))
        elif name == CONSTANT:
            values.append(_constant(args[0], args[1], like))
        else:
            values.append(find_operator(name)(*args, **kwargs))
        for number in done:  # a map without backward would hold it to the end
            values[number] = None
    result: Tensor = values[-1]
    return result


def _constant(numbers: list[float], shape: list[int], like: Tensor) -> Tensor:
    if len(numbers) != prod(shape):
        raise ValueError(f"{len(numbers)} numbers of the shape {shape}")
    if like.is_meta:
        return like.new_empty(shape)
    return torch.tensor(numbers, dtype=like.dtype, device=like.device).reshape(shape)


def _is_named(argument: Any) -> bool:
    return isinstance(argument, tuple) and argument[0] == "named"


def _resolve(argument: Any, values: list[Any], sizes: dict[str, int]) -> Any:
    match argument:
        case ("value", number):
            return values[number]
        case ("size", number, letters):
            for letter in letters:
                number *= sizes[letter]
            return number
        case ("list", *arguments):
            return [_resolve(part, values, sizes) for part in arguments]
    return argument


def _is_view(layer: Cellwise) -> bool:
    """Whether the result lies where one of the maps does."""
    first = len(layer.channels) + 1 + len(layer.weights)
    number = first + len(layer.steps) - 1
    while number >= first:
        name, *arguments = layer.steps[number - first]
        if name.partition(".")[0] not in VIEWS or not arguments:
            return False
        sources = _values_of(arguments[0])
        number = next(iter(sources), -1)
    return number >= 0


@lru_cache(maxsize=4096)
def _last_uses(layer: Cellwise | Conv) -> tuple[tuple[int, ...], ...]:
    """Return the results that each step is the last to take."""
    maps = len(layer.channels) + 1 if isinstance(layer, Cellwise) else 0
    first = maps + len(layer.weights)
    used: set[int] = set()
    last = []
    for number, step in reversed(list(enumerate(layer.steps))):
        done = {n for n in _values_of(step) if n >= first} - used
        used |= done
        last.append(tuple(done) if number < len(layer.steps) - 1 else ())
    return tuple(reversed(last))


def _values_of(argument: Any) -> set[int]:
    if isinstance(argument, tuple) and argument:
        if argument[0] == "value":
            return {argument[1]}
        return set().union(*(_values_of(part) for part in argument))
    return set()


class _Bounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators, and refuses results that are larger than a map may be."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() > MOST_NUMBERS:
            raise ValueError(f"{func} makes {result.numel()} numbers of 2 x 3 x 5 cells")
        return result


@lru_cache(maxsize=4096)
def _check(layer: Cellwise) -> None:
    """Refuse operators that are not known, and lists that make another map than the layer says."""
    _check_operators(layer)
    channels = list(layer.channels)
    channels.insert(layer.place, layer.in_channels)
    size = (2, 3, 5)
    maps = [
        torch.empty(size[0], wide, *((1, 1) if n in layer.single else size[1:]), device="meta")
        for n, wide in enumerate(channels)
    ]
    weights = _without_memory(layer)
    cells = (1, 1) if len(layer.single) == len(maps) else size[1:]
    expected = (size[0], layer.out_channels, *cells)
    shape = _shape_of(lambda: _computed(layer, maps, weights, _last_uses(layer)))
    if shape != expected:
        raise TilenetError(
            f"a layer's operators make the map that it says (of network.json: {expected}, they "
            f"make: {shape}); use another checkpoint"
        )


@lru_cache(maxsize=4096)
def check_kernel(layer: Conv) -> None:
    """Refuse a kernel that is computed by unknown operators, or has another shape than the layer's.

    Raises:
        TilenetError: Names the operator or the shape.
    """
    _check_operators(layer)
    weights: list[Any] = [*_without_memory(layer)]
    like = torch.empty((), device="meta")
    shape = _shape_of(lambda: _run(layer.steps, weights, {}, like, _last_uses(layer)))
    if shape != layer.kernel_shape:
        raise TilenetError(
            f"a kernel's operators make the kernel that the layer has (of network.json: "
            f"{layer.kernel_shape}, they make: {shape}); use another checkpoint"
        )


def _shape_of(compute: Callable[[], Tensor]) -> Any:
    """Shape of a result, or the error in its place."""
    try:
        with _Bounded():  # type: ignore[no-untyped-call]
            return tuple(compute().shape)
    except Exception as error:  # torch may raise anything for a list of a file
        return f"{type(error).__name__}: {str(error)[:200]}"


def _without_memory(layer: Cellwise | Conv) -> list[Tensor]:
    return [torch.empty(shape, device="meta") for _, shape, _ in layer.weights]


def _check_operators(layer: Cellwise | Conv) -> None:
    for step in layer.steps:
        if step[0] not in (ITEM, CONVERT, CONSTANT) and find_operator(step[0]) is None:
            raise TilenetError(
                f"a layer acts on each cell by operators that are known to ({step[0]} of this "
                "version of torch is not); use another checkpoint, or the version that wrote it"
            )
