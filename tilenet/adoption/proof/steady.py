"""Run a module twice on an image: its result follows from image and weights, and from nothing else.

What a module keeps from one call to the next, or draws from other generators than torch's, is not
in a list of layers.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tilenet.errors import TilenetError

ROUNDING = 1e-9  # of float64, relative to the largest value
OTHERS = 0, 10**6, -(10**6)  # values that such a number may come to have
GENERATORS = "the state of Python's or numpy's random numbers"


def prove_steady(module: nn.Module, run: Callable[[Tensor], Tensor], image: Tensor) -> None:
    """Compare what two runs on an image give, and what the module holds after each.

    A number that the module keeps, such as a count of calls or seconds, may change from call to
    call if the result is the same whatever it is.

    Args:
        module: The module, in a mode.
        run: Runs it; gives its first map.
        image: An image (B, bands, H, W) that it has not seen.

    Raises:
        TilenetError: Something else than image, weights and buffers decides the result.
    """
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]  # of running statistics
    states = random.getstate(), np.random.get_state()  # noqa: NPY002, the one that modules take
    with torch.no_grad():
        before = _weights_of(module)
        outputs = [run(image)]
        values, after = _values_of(module), _weights_of(module)
        outputs.append(run(image))
        changed = [name for name, value in before.items() if after[name] != value]
        if _differ(*outputs):
            changed.append("what it keeps of an image")
        changed += [
            name
            for name, value in _values_of(module).items()
            if values.get(name) != value and _decides(module, name, run, image)
        ]
        for buffer, value in buffers:
            buffer.copy_(value)
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    if changed:
        raise TilenetError(
            f"a network's result follows from its image and weights alone (while "
            f"{type(module).__name__} runs, {changed[0]} changes); keep nothing from one call to "
            "the next, and use dropout or random numbers of torch"
        )


def _differ(first: Tensor, second: Tensor) -> bool:
    return float((second - first).abs().max()) > ROUNDING * float(first.abs().max())


def _decides(module: nn.Module, name: str, run: Callable[[Tensor], Tensor], image: Tensor) -> bool:
    """Whether the result depends on a value that the module holds."""
    path, _, attribute = name.rpartition(".")
    part = module.get_submodule(path)
    held = getattr(part, attribute)
    if not isinstance(held, int | float):
        return True
    expected = run(image)
    for value in OTHERS:
        setattr(part, attribute, type(held)(value))
        if _differ(expected, run(image)):
            return True
    setattr(part, attribute, held)
    return False


def _weights_of(module: nn.Module) -> dict[str, Any]:
    """Places of weights in memory, where one that is replaced is computed, and generators."""
    state = np.random.get_state()  # noqa: NPY002
    weights = {f"the tensor of {name}": p.data_ptr() for name, p in module.named_parameters()}
    drawn = random.getstate(), state[1].tobytes(), state[2:]  # type: ignore[index]
    return weights | {GENERATORS: drawn}


def _values_of(module: nn.Module) -> dict[str, Any]:
    """Numbers and texts that the module and its parts hold, and states of generators."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, part in module.named_modules()
        for name, held in vars(part).items()
        if (value := _value(held)) is not None
    }


def _value(held: object) -> object:
    if isinstance(held, random.Random):
        return held.getstate()
    if isinstance(held, np.random.Generator):
        return repr(held.bit_generator.state)
    # As text, since NaN does not equal itself.
    return repr(held) if isinstance(held, bool | int | float | str) else None
