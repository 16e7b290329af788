"""From a module to the maps of its graph.

`torch.export` records the operators that a forward pass runs, at one size. They are interpreted one
after another: each map is a `Value`, whose layer `operators.py` tells.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from tilenet.adoption.calls import Call, Seen, Weight
from tilenet.adoption.operators import OPERATORS
from tilenet.adoption.values import Value
from tilenet.errors import TilenetError

__all__ = ["graph_of"]

IN_PLACE = "_"


def graph_of(module: nn.Module, bands: int, size: tuple[int, int], batch_norm: str) -> Value:
    """The map that a module makes of an image (B, bands, *size), with all that it is made of.

    Args:
        module: In training mode, so that dropout is seen.
        batch_norm: What is made of batch norm's statistics: `frozen` or `step`.

    Raises:
        TilenetError: It cannot be recorded, or an operator cannot be a layer.
    """
    return _Interpreter(_exported(module, bands, size), batch_norm).run()


def _exported(module: nn.Module, bands: int, size: tuple[int, int]) -> ExportedProgram:
    image = torch.randn(2, bands, *size)
    try:
        with _quiet():
            return torch.export.export(module, (image,), strict=False)
    except Exception as error:  # whatever a module's own code may raise
        words = " ".join(str(error).split())
        raise TilenetError(
            f"a module must take one image (B, {bands}, {size[0]}, {size[1]}) and do the same to "
            f"each ({type(module).__name__}: {words[:300]}); use a network without what depends on "
            "the pixels' values, or another number of bands"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch writes of an export that fails from the terminal: it is raised as well."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Interpreter:
    """Walks a graph; each node's result is a map, a weight, or something on its way to a layer."""

    def __init__(self, program: ExportedProgram, batch_norm: str) -> None:
        self.program, self.batch_norm = program, batch_norm
        self.names: dict[fx.Node, int] = {}  # results by number: in-place operators share one
        self.results: list[Any] = []
        self.maps: list[Value] = []

    def run(self) -> Value:
        signature = self.program.graph_signature
        parameters = signature.inputs_to_parameters
        weights = {**parameters, **signature.inputs_to_buffers}
        weights |= signature.inputs_to_lifted_tensor_constants
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                result: Any
                if node.name in weights:
                    shape = tuple(node.meta["val"].shape)
                    result = Weight(weights[node.name], shape, node.name in parameters)
                else:
                    shape = node.meta["val"].shape
                    result = Seen(Value(shape[1], (shape[2], shape[3])))
                    self.maps.append(result.value)
                self._note(node, result)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "get_attr":
                call = Call(_path(node), str(node.target), (), self.batch_norm, self.maps)
                self._note(node, call.refused("a part is recorded as one operator"))
            elif node.op == "output":
                return self._output(node)
        raise AssertionError("a graph has an output")

    def _note(self, node: fx.Node, result: Any) -> None:
        self.names[node] = len(self.results)
        self.results.append(result)

    def _call(self, node: fx.Node) -> None:
        operator = str(node.target).split(".")[1] if "." in str(node.target) else str(node.target)
        plain = operator.rstrip(IN_PLACE)
        given = [self._argument(one) for one in node.args]
        given += [
            self._argument(v) for k, v in node.kwargs.items() if k in ("alpha", "approximate")
        ]
        value = node.meta.get("val")
        if isinstance(value, list | tuple):
            call = Call(_path(node), plain, (), self.batch_norm, self.maps)
            self._note(node, call.refused("nobody knows what this operator looks at"))
            return
        if not isinstance(value, torch.Tensor):
            self._note(node, None)
            return
        if given and isinstance(given[0], Weight) and not given[0].trained and plain == "add":
            self._note(node, given[0])  # a count of batches
            return
        call = Call(_path(node), plain, tuple(value.shape), self.batch_norm, self.maps)
        # Only what is used is refused: parts of a module may lead nowhere.
        result: Any = next((one for one in _flat(given) if isinstance(one, TilenetError)), None)
        try:
            if result is None and plain not in OPERATORS:
                raise call.refused("nobody knows what this operator looks at")
            result = result or OPERATORS[plain](call, given)
        except TilenetError as error:
            result = error
        if isinstance(result, Seen):
            self.maps.append(result.value)
        if operator.endswith(IN_PLACE):  # all names of the argument see the result
            assert isinstance(node.args[0], fx.Node)
            self.names[node] = self.names[node.args[0]]
            self.results[self.names[node]] = result
        else:
            self._note(node, result)

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self.results[self.names[argument]]
        if isinstance(argument, list | tuple):
            return [self._argument(one) for one in argument]
        return argument

    def _output(self, node: fx.Node) -> Value:
        result = self._argument(node.args[0])
        mutated = len(self.program.graph_signature.buffers_to_mutate)
        result = result[mutated] if isinstance(result, list) else result
        if isinstance(result, TilenetError):
            raise result
        if not isinstance(result, Seen) or result.last or result.zeros != (0, 0):
            raise TilenetError(
                "a module must give a map (B, classes, H, W) first; wrap it in one that does"
            )
        if result.value.size != self.maps[0].size:
            raise TilenetError(
                f"a network must give one cell per input pixel (of {self.maps[0].size} px it makes "
                f"{result.value.size}); enlarge the map at its end"
            )
        return result.value


def _flat(given: list[Any]) -> list[Any]:
    return [one for part in given for one in (part if isinstance(part, list) else [part])]


def _path(node: fx.Node) -> str:
    """Path of the submodule that calls an operator."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack else ""
