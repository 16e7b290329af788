"""What is done about the maps that some modules of a network keep for backward.

- keep: nothing; they stay.
- swap: they go out when there are too many, and come back.
- checkpoint: only the module's inputs stay; the rest is computed again.
- both: as checkpoint, and the inputs are swapped.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal, get_args

from torch import nn

from tilenet.errors import TilenetError
from tilenet.parallel.swap.recompute import checkpointed
from tilenet.parallel.swap.swapper import SwapInForward, Swapper

__all__ = ["Action", "acting"]

Action = Literal["keep", "checkpoint", "swap", "both"]


@contextmanager
def acting(
    modules: Sequence[nn.Module], actions: Sequence[Action], swapper: Swapper
) -> Iterator[None]:
    """Apply an action to each of some modules; outputs and gradients stay the same bits.

    Backward may run behind the context. Where one module is part of another, of two that swap the
    outer one does it, and nothing is swapped within one that is computed again.

    Args:
        modules: Any modules, each once.
        actions: One per module.
        swapper: Gets what is swapped.

    Raises:
        TilenetError: A module is there twice, or an action is none; in forward: a module that is
            computed again writes over its input.
    """
    if len(modules) != len(actions) or len({id(module) for module in modules}) != len(modules):
        raise TilenetError(
            f"each module gets one action (modules: {len(modules)}, different ones: "
            f"{len({id(module) for module in modules})}, actions: {len(actions)}); name each once"
        )
    unknown = [action for action in actions if action not in get_args(Action)]
    if unknown:
        raise TilenetError(
            f"an action is one of {', '.join(get_args(Action))} (found: {unknown[0]!r}); choose one"
        )
    hooks = SwapInForward(swapper)
    with ExitStack() as stack:
        stack.callback(hooks.leave)
        for module, action in zip(modules, actions, strict=True):
            # The swapper's hooks are around the checkpoint's, which then saves its inputs there.
            if action in ("swap", "both"):
                stack.enter_context(hooks.around(module))
            if action in ("checkpoint", "both"):
                stack.enter_context(checkpointed(module))
        yield
