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

__all__ = ["prove_steady"]

ROUNDING = 1e-9  # of float64, relative to the largest value
GENERATORS = "the random numbers of Python or numpy"


def prove_steady(module: nn.Module, run: Callable[[Tensor], Tensor], image: Tensor) -> None:
    """Compare what two runs on an image give, and what the module holds after each.

    Args:
        module: The module.
        run: Runs it; gives its first map.
        image: An image (B, bands, H, W) that it has not seen.

    Raises:
        TilenetError: It changes more than tensors and buffers, which results do not depend on.
    """
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]  # of running statistics
    with torch.no_grad():
        outputs, held = [], [_weights_of(module) | {GENERATORS: _generators()}]
        for _ in range(2):
            outputs.append(run(image))
            held.append(_weights_of(module) | {GENERATORS: _generators()} | _values_of(module))
        for buffer, before in buffers:
            buffer.copy_(before)
    changed = [name for name, value in held[2].items() if held[1][name] != value]
    changed += [name for name, value in held[0].items() if held[1][name] != value]
    apart = float((outputs[1] - outputs[0]).abs().max())
    if apart > ROUNDING * float(outputs[0].abs().max()):
        changed.append("what it keeps of an image")
    if changed:
        raise TilenetError(
            f"a network's result follows from its image and weights alone (while "
            f"{type(module).__name__} runs, {changed[0]} changes); keep nothing from one call to "
            "the next, and use dropout or random numbers of torch"
        )


def _weights_of(module: nn.Module) -> dict[str, Any]:
    """Places of weights in memory: a weight that is replaced is computed."""
    return {f"the tensor of {name}": p.data_ptr() for name, p in module.named_parameters()}


def _values_of(module: nn.Module) -> dict[str, Any]:
    """Numbers and words that the module and its parts hold, and states of generators."""
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
    return held if isinstance(held, bool | int | float | str) else None


def _generators() -> object:
    state = np.random.get_state()  # noqa: NPY002, the one that modules draw from
    return random.getstate(), state[1].tobytes(), state[2:]  # type: ignore[index]
