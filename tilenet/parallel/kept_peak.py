"""Most bytes of tensors that would be alive in a part of a program if what it saves stayed."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["KeptPeak"]


class KeptPeak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts storages from the operation that makes them until they die.

    What is saved counts until the next part begins, though a swapper may have sent it away. What
    operations take for themselves inside no tensor shows. Modes belong to a thread; autograd hands
    the caller's to its own.

    Attributes:
        peak: Most bytes since the part began or since `peak` was set.
        current: Bytes now.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.begin([])
        self._paused = False

    def begin(self, tensors: Iterable[Tensor]) -> None:
        """Begin a part, at whose begin there are some tensors that count."""
        self.current = self.peak = 0
        self._counted: Any = WeakIdKeyDictionary()  # storage -> whether it counts when it has died
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor, saved: bool = False) -> None:
        """Count a tensor's storage, once; if it is saved, though it may die."""
        storage = tensor.untyped_storage()
        if storage not in self._counted:
            self._counted[storage] = stays = [saved]
            self.current += storage.nbytes()
            self.peak = max(self.peak, self.current)
            finish = weakref.finalize(storage, self._die, self._counted, stays, storage.nbytes())
            finish.atexit = False
        self._counted[storage][0] |= saved

    def drop(self, tensor: Tensor) -> None:
        """Count a tensor's storage no more."""
        stays = self._counted.pop(tensor.untyped_storage(), [True])
        if not stays[0]:
            stays[0] = True  # its death changes nothing
            self.current -= tensor.untyped_storage().nbytes()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let operations make what they like, as a swapper's copies."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if not self._paused:
            given = {id(s): s for s in (x.untyped_storage() for x in _plain((args, kwargs)))}
            for tensor in _plain(made):
                if id(tensor.untyped_storage()) not in given:
                    self.add(tensor)
        return made

    def _die(self, counted: Any, stays: list[bool], num_bytes: int) -> None:
        if counted is self._counted and not stays[0]:
            self.current -= num_bytes


def _plain(values: Any) -> list[Tensor]:
    leaves = (x for x in tree_leaves(values) if isinstance(x, Tensor))
    return [x for x in leaves if x.layout is torch.strided]
