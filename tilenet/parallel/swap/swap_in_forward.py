"""Swap the tensors that autograd saves during the forward of modules.

Hooks belong to a thread, and a pipeline's layers run on threads of their own, again in backward
where activations are recomputed: so the hooks are entered where a module begins, and left where it
ends.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tilenet.parallel.swap.swapper import Swapper


class SwapInForward:
    """Forward hooks that enter and leave a swapper's saved-tensor hooks.

    Where other such hooks are at work already, they go on and these are not entered: a
    non-reentrant checkpoint would else keep all that it is there to recompute.

    Args:
        swapper: The swapper that gets the tensors.
    """

    def __init__(self, swapper: Swapper) -> None:
        self._swapper = swapper
        self._thread = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> "SwapInForward":
        return self  # a module's copy is swapped with it

    @contextmanager
    def around(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Swap in the forward of these modules; backward may run after the context.

        If a module is part of another one, the outer one enters the hooks.
        """
        with ExitStack() as stack:
            stack.callback(self.leave)
            for module in modules:
                stack.enter_context(module.register_forward_pre_hook(self.before, prepend=True))
                stack.enter_context(module.register_forward_hook(self.after, always_call=True))
            yield

    def before(self, module: nn.Module, args: Any) -> None:
        """Enter; a module's forward pre-hook."""
        hooks = None
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
            hooks = saved_tensors_hooks(self._swapper.pack, self._swapper.unpack)
            hooks.__enter__()
        self._entered().append((module, hooks))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Leave; a module's forward hook, called always."""
        entered = self._entered()
        # It may not have been entered: another module's hook failed first.
        if entered and entered[-1][0] is module:
            _, hooks = entered.pop()
            if hooks is not None:
                hooks.__exit__()

    def leave(self) -> None:
        """Leave all hooks that this thread did not leave, after an interrupt for instance."""
        entered = self._entered()
        while entered:
            _, hooks = entered.pop()
            if hooks is not None:
                hooks.__exit__()

    def _entered(self) -> list[tuple[nn.Module, saved_tensors_hooks | None]]:
        entered: list[tuple[nn.Module, saved_tensors_hooks | None]]
        entered = self._thread.__dict__.setdefault("entered", [])
        return entered
