"""Interpret the graph that `torch.export` records of a module.

The graph lists the operators that a forward pass runs, at one size. They are interpreted one after
another: each map becomes a `Value`; the operator's function in `operators.py` returns its layer.
"""

import logging
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from inspect import signature
from io import StringIO
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from tilenet.adoption.calls import (
    OTHER_NOISE,
    WITHOUT_EFFECT,
    Arguments,
    Call,
    Moved,
    Noise,
    Places,
    Refusal,
    refusal_of,
)
from tilenet.adoption.cells import (
    IMAGES,
    Cells,
    Weight,
    cells_of,
    constant_of,
    map_of,
    maps_in,
)
from tilenet.adoption.cellwise import cellwise, from_map, to_map
from tilenet.adoption.edges import settled
from tilenet.adoption.laid import laid_on
from tilenet.adoption.mapless import Mapless, compute_mapless
from tilenet.adoption.operators import OPERATORS
from tilenet.adoption.values import Value, maps_before
from tilenet.adoption.writes import Memory, memory_owner, writes, written_arguments
from tilenet.errors import TilenetError

IN_PLACE = "_"
TORCH = os.path.dirname(torch.__file__)
# Operators with a function of their own; with unusual arguments they are operators on cells.
ALSO_CELLWISE = frozenset(
    {"add", "div", "amax", "linalg_vector_norm", "mean", "norm", "sub", "sum"}
)
TAKE_MOVED = frozenset({"conv2d", "div", "pad", "slice"})
DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
ANY = "_"  # a parameter of a function that takes any other argument


def graph_of(module: nn.Module, bands: int, size: tuple[int, int], batch_norm: str) -> Value:
    """The output of a module for an image (B, bands, *size), with all maps that lead to it.

    Args:
        module: A module in training mode, so that dropout is recorded.
        batch_norm: Treatment of batch norm's statistics: `frozen` or `step`.

    Raises:
        TilenetError: It cannot be recorded, or an operator cannot be a layer.
    """
    return _Interpreter(_export(module, bands, size), module, batch_norm).run()


def _export(module: nn.Module, bands: int, size: tuple[int, int]) -> ExportedProgram:
    image = torch.randn(IMAGES, bands, *size, dtype=torch.float32)
    try:
        with _quiet(), _DataDetached():
            return torch.export.export(module, (image,), strict=False)
    except Exception as error:  # a module's own code may raise anything
        words = " ".join(str(error).split())
        for part in module.modules():
            if remedy := _made_of_another(part):
                raise TilenetError(
                    f"a network is a module as its class computes it ({type(part).__name__}: "
                    f"{words[:100]}); {remedy}"
                ) from error
        raise TilenetError(
            f"a module must take one image (B, {bands}, {size[0]}, {size[1]}) and do the same to "
            f"each ({type(module).__name__}: {words[:300]}); remove branches that depend on "
            "pixels' values, name another number of bands, or use halo_mode: windows (window_px in "
            "predict), which is approximate"
        ) from error


def _made_of_another(module: nn.Module) -> str:
    """How to get the module that torch made this one of, if it did."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "pass its .module"
    exported = isinstance(module, fx.GraphModule) and hasattr(module, "_guards_fn")
    return "pass the module that was exported" if exported else ""


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch while it exports: the error of a failing export holds the same text.

    Where a graph depends on pixels' values, torch prints that too, at each size.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        unread = StringIO()
        with warnings.catch_warnings(), redirect_stdout(unread), redirect_stderr(unread):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _DataDetached(TorchFunctionMode):
    """Replaces `x.data` by `x.detach()`: the exporter would record `x.data` as a constant."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0].detach() if func == DATA else func(*args, **(kwargs or {}))


class _Interpreter:
    """Walks a graph; each node's result is a map, a weight, or something on its way to a layer."""

    def __init__(self, program: ExportedProgram, module: nn.Module, batch_norm: str) -> None:
        self.program, self.batch_norm = program, batch_norm
        self.tensors, self.memory = _Tensors(program, module), Memory(program.graph)
        self.names: dict[fx.Node, int] = {}  # results by number: in-place operators share one
        self.results: list[Any] = []
        self.maps: list[Value] = []
        self.used_noise: list[object] = []  # sources of random numbers that drop samples of a map
        # Stand-ins for results of refused operators, so that one error names all of them.
        self.refused: list[tuple[Value, Refusal]] = []

    def run(self) -> Value:
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                tensor = self.tensors.tensor_of(node)
                if tensor is None:
                    _, bands, *size = node.meta["val"].shape
                    image = Value(bands, (size[0], size[1]))
                    self.maps.append(image)
                    self._note(node, cells_of(image))
                else:
                    self._note(node, tensor)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "get_attr":
                self._note(node, self._call_of(node).refused("a part is recorded as one operator"))
            elif node.op == "output":
                return self._output(node)
        raise AssertionError("a graph has an output")

    def _note(self, node: fx.Node, result: Any) -> None:
        self.names[node] = len(self.results)
        self.results.append(result)

    def _call_of(self, node: fx.Node) -> Call:
        """The call of a node."""
        target = str(node.target).split(".", 1)[-1]
        name, _, overload = target.partition(".")
        plain = name.rstrip(IN_PLACE)
        value: Any = node.meta.get("val")
        several = isinstance(value, list | tuple)
        tensors = [t for t in (value if several else [value]) if isinstance(t, torch.Tensor)]
        shapes = [tuple(t.shape) for t in tensors]
        return Call(
            where=_path(node),
            line=_line(node),
            operator=plain,
            target=f"{plain}.{overload}",
            shape=shapes if several else next(iter(shapes), ()),
            floats=all(t.dtype == torch.float32 for t in tensors),
            batch_norm=self.batch_norm,
            maps=self.maps,
        )

    def _call(self, node: fx.Node) -> None:
        value, call = node.meta.get("val"), self._call_of(node)
        if node.target is getitem:
            parts, number = self._argument(node.args[0]), node.args[1]
            assert isinstance(number, int)
            self._note(node, parts[number] if isinstance(parts, list) else parts)
            return
        if writes(node) and self.tensors.check_written(node, call):
            self._note(node, self._argument(node.args[0]))  # a count of batches
            return
        self._check_writes(node, call)
        if not isinstance(value, torch.Tensor | list | tuple):
            outcome = None if value is None else call.refused("a number is taken out of a tensor")
            self._note(node, outcome)
            return
        kwargs = {name: self._argument(argument) for name, argument in node.kwargs.items()}
        result = self._apply(call, node.target, self._argument(node.args), kwargs)
        if isinstance(result, Refusal) and isinstance(call.shape, tuple) and call.floats:
            result = self._stand_in(node, call, result)
        if isinstance(result, list):
            result = [_as_map(call, part) for part in result]
        else:
            result = _as_map(call, result)
        if writes(node):  # all names of the argument see the result
            assert isinstance(node.args[0], fx.Node)
            self.names[node] = self.names[node.args[0]]
            self.results[self.names[node]] = result
        else:
            self._note(node, result)

    def _check_writes(self, node: fx.Node, call: Call) -> None:
        """Refuse writes over what has other names, as a part of a map that is read again."""
        if any(written_arguments(node)[1:]):
            raise call.refused("an operator writes its result over a map (out)")
        if writes(node) and (read := self.memory.read_again(node)):
            line = f" before {where} reads it" if (where := _line(read)) else ""
            raise call.refused(
                "forward writes over a part of a map, or a map that parts were taken of before; "
                "make a new one, with torch.cat or without in-place operators",
                values=line,
            )

    def _stand_in(self, node: fx.Node, call: Call, refusal: Refusal) -> Any:
        """A map in place of the result of a refused call; an argument's refusal is passed on."""
        arguments = _flat(self._argument([*node.args, *node.kwargs.values()]))
        arguments = [x.cells if isinstance(x, Moved) else x for x in arguments]
        cells = [x for x in arguments if isinstance(x, Cells) and x.size]
        like = next((x for x in cells if x.shape == call.shape), None)
        if any(x is refusal for x in arguments) or (like is None and len(call.sizes) != 4):
            return refusal
        inputs = tuple(value for x in cells for value in maps_in(x))
        if like is None:
            value = Value(call.sizes[1], (call.sizes[2], call.sizes[3]), inputs=inputs)
            result = cells_of(value)
        else:
            value = Value(to_map(like).shape[1], like.size or (1, 1), like.whole, inputs=inputs)
            result = from_map(cells_of(value), like.dims)
        self.refused.append((value, refusal))
        return result

    def _apply(self, call: Call, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of a call, or its refusal, which is raised where the result is used."""
        schema, values = _bind(function, args, kwargs)
        # A refusal counts only if its result is used: parts of a module may lead nowhere.
        flat = _flat(list(values.values()))
        for argument in flat:
            if isinstance(argument, TilenetError) and not (
                isinstance(argument, Places) and call.operator == "max_unpool2d"
            ):
                return argument
        try:
            if any(isinstance(argument, Mapless) for argument in flat):
                tensors = [settled(call, x) for x in flat if isinstance(x, Cells | Moved)]
                if not tensors:
                    return compute_mapless(call, function, args, kwargs)
                lay = partial(laid_on, call, tensors, self._apply)
                values = {name: lay(argument) for name, argument in values.items()}
            if call.operator not in TAKE_MOVED:
                values = {name: settled(call, argument) for name, argument in values.items()}
            if call.operator in OPERATORS and not _of_weights(call, values):
                result = self._layer(call, schema, values)
                if result is not NotImplemented:
                    return result
            values = {name: settled(call, argument) for name, argument in values.items()}
            return cellwise(call, _arguments(call, schema, values))
        except TilenetError as error:
            alone = not any(isinstance(x, Cells | Moved | Noise | Mapless) for x in flat)
            return compute_mapless(call, function, args, kwargs) if alone else error
        except Exception as error:  # an unknown form of the call
            words = f" {type(error).__name__}: {error}"
            return call.refused("this form of the operator is unknown", values=words)

    def _layer(self, call: Call, schema: list[Any], values: dict[str, Any]) -> Any:
        """The result of the operator's own function; other arguments must hold their defaults."""
        function = OPERATORS[call.operator]
        self._check_noise(call, values)
        x, *parameters = schema
        known = signature(function).parameters
        for parameter in parameters:
            if parameter.name in known or parameter.name in WITHOUT_EFFECT or ANY in known:
                continue
            if _is_default(values[parameter.name], parameter):
                continue
            if call.operator in ALSO_CELLWISE:
                return NotImplemented
            raise call.refused(
                "an argument is not the usual one",
                values=f" with {parameter.name}: {values[parameter.name]}",
            )
        more = {p.name: values[p.name] for p in parameters if p.name in known}
        return function(call, values[x.name], **more)

    def _check_noise(self, call: Call, values: dict[str, Any]) -> None:
        """Refuse masks that are used twice: each layer that drops draws its own."""
        for argument in values.values():
            if isinstance(argument, Noise) and (call.operator == "mul" or argument.thinned):
                if argument.source in self.used_noise:
                    raise call.refused("the same random numbers drop samples of several maps")
                self.used_noise.append(argument.source)

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self.results[self.names[argument]]
        if isinstance(argument, list | tuple):
            return [self._argument(part) for part in argument]
        return argument

    def _output(self, node: fx.Node) -> Value:
        result = self._argument(node.args[0])
        result = result[0] if isinstance(result, list) and result else result
        try:
            result = settled(self._call_of(node), result)
        except Refusal as error:
            result = error
        if isinstance(result, Refusal):
            raise TilenetError(refusal_of([*(refusal for _, refusal in self.refused), result]))
        if isinstance(result, TilenetError):
            raise result
        is_map = isinstance(result, Cells) and result.is_map
        needed = {id(value) for value in maps_before(map_of(result))} if is_map else set()
        refusals = [refusal for value, refusal in self.refused if not is_map or id(value) in needed]
        if refusals:
            raise TilenetError(refusal_of(refusals))
        if not is_map or not result.size:
            raise TilenetError(
                "a module must return a map (B, classes, H, W), alone or first; wrap it in one "
                "that does"
            )
        if result.size != self.maps[0].size:
            raise TilenetError(
                f"a network must give one cell per input pixel (of {self.maps[0].size} px it makes "
                f"{result.size}); enlarge the map at its end"
            )
        return map_of(result)


def _as_map(call: Call, result: Any) -> Any:
    """Cells that form a map again as a map, which one layer computes once; else the result."""
    if not isinstance(result, Cells) or result.source is not None or not result.is_map:
        return result
    return cells_of(call.entered(map_of(result)))


def _flat(arguments: list[Any]) -> list[Any]:
    return [x for part in arguments for x in (part if isinstance(part, list) else [part])]


def _of_weights(call: Call, values: dict[str, Any]) -> bool:
    """Whether an operator's first argument is computed from weights and numbers alone."""
    first = _flat([next(iter(values.values()), None)])
    if not first or not all(isinstance(x, Cells) for x in first) or call.operator == "detach":
        return False
    return not any(x.size or x.over_cells(place) for x in first for place in range(len(x.dims)))


def _path(node: fx.Node) -> str:
    """Path of the submodule that calls an operator."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack else ""


def _line(node: fx.Node) -> str:
    """File and line of the user's source that calls an operator."""
    calls = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in calls if not file.startswith(TORCH)]
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else ""


class _Tensors:
    """The module's parameters, buffers and constants as a graph names them."""

    def __init__(self, program: ExportedProgram, module: nn.Module) -> None:
        inputs = program.graph_signature
        self.names = {**inputs.inputs_to_parameters, **inputs.inputs_to_buffers}
        self.constant_names = inputs.inputs_to_lifted_tensor_constants
        self.constants = dict(program.constants)
        # The first name of a tensor that has several, by the tensor's id.
        self.first_names: dict[int, str] = {}
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        self.buffers = dict(module.named_buffers(remove_duplicate=False))
        for name, tensor in {**self.parameters, **self.buffers}.items():
            self.first_names.setdefault(id(tensor), name)
        self.persistent = module.state_dict().keys()
        self.counters = {
            f"{path}.num_batches_tracked" if path else "num_batches_tracked"
            for path, part in module.named_modules(remove_duplicate=False)
            if isinstance(part, nn.modules.batchnorm._BatchNorm)
        }

    def tensor_of(self, node: fx.Node) -> Cells | float | None:
        """The weight, buffer or constant that is an input of the graph; None: the image."""
        shape = tuple(node.meta["val"].shape)
        name = self.names.get(node.name)
        if name is None:
            constant = self.constant_names.get(node.name)
            return None if constant is None else constant_of(constant, self.constants[constant])
        if name in self.parameters:
            tensor = self.parameters[name]
            return cells_of(Weight(self.first_names[id(tensor)], shape, tensor.requires_grad))
        buffer = self.buffers[name]
        name = self.first_names[id(buffer)]
        if name not in self.persistent or not buffer.is_floating_point():
            return constant_of(name, buffer)
        return cells_of(Weight(name, shape, trained=False))

    def check_written(self, node: fx.Node, call: Call) -> bool:
        """Refuse a write over the image or the module; return whether the call counts batches."""
        owner = memory_owner(node)
        if owner.op != "placeholder":
            return False
        name = self.names.get(owner.name, self.constant_names.get(owner.name))
        if name in self.counters and call.operator == "add":
            return True
        what = "its image" if name is None else name
        raise call.refused(f"forward itself changes {what}")


def _bind(
    function: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The parameters of an operator's schema, and the value of each in a call."""
    schema = getattr(function, "_schema", None)
    if schema is None:
        return [], {str(number): argument for number, argument in enumerate(args)}
    values = {p.name: p.default_value for p in schema.arguments}
    values |= {p.name: value for p, value in zip(schema.arguments, args, strict=False)}
    return list(schema.arguments), {**values, **kwargs}


def _arguments(call: Call, schema: list[Any], values: dict[str, Any]) -> Arguments:
    """A call's arguments in the form that a cellwise step holds."""
    for argument in values.values():
        if isinstance(argument, Noise):
            raise call.refused(OTHER_NOISE)
    return Arguments(
        {name: _freeze(argument) for name, argument in values.items()},
        frozenset(p.name for p in schema if _is_default(values[p.name], p)),
        frozenset(p.name for p in schema if p.kwarg_only),
    )


def _freeze(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return "list", *(_freeze(part) for part in argument)
    # The precision in which a graph is recorded stands for the map's own.
    return None if argument is torch.float32 else argument


def _is_default(value: Any, argument: Any) -> bool:
    """Whether a value is the schema's default, which may be one number for rows and columns."""
    if not argument.has_default_value():
        return False
    default = argument.default_value
    if isinstance(value, Cells | Moved | Noise):
        return False
    if isinstance(value, list) and not isinstance(default, list):
        return bool(value) and all(part == default for part in value)
    return bool(value == default)
