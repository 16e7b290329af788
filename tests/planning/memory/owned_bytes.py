"""Live bytes by owner: which partition each storage of a counted step belongs to."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from tilenet.planning.memory.live import LiveBytes

OwnerRule = Callable[[Any, list[Tensor]], int]
ScratchRule = Callable[[Any, Any, dict[str, Any]], int]


class OwnedBytes(LiveBytes):  # type: ignore[no-untyped-call]
    """Live bytes, each storage of which is charged to a number.

    Autograd adds up gradients in place where nothing else holds the first one, but not where a mode
    looks on; here it does so all the same.

    `owner_rule` says from an operation and its tensors to whom its new storages are charged, else
    it is `owner`; `scratch`, how many bytes it takes inside, which count for the peaks only.
    """

    def __init__(
        self, owner_rule: OwnerRule | None = None, scratch: ScratchRule | None = None
    ) -> None:
        super().__init__()
        self.owner = self._charged = 0
        self.current_of: dict[int, int] = defaultdict(int)
        self.peak_of: dict[int, int] = defaultdict(int)
        self.owner_rule = owner_rule
        self._scratch = scratch
        self._owners: Any = WeakIdKeyDictionary()

    def charge(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors that were made before, for `owner`."""
        self._charged = self.owner
        super().charge(tensors)

    def owner_of(self, tensor: Tensor) -> int | None:
        """To whom a tensor's storage is charged; None: it is not counted."""
        owner: int | None = self._owners.get(tensor.untyped_storage())
        return owner

    def reset_peaks(self) -> None:
        """Let the peaks start over at what lives now."""
        super().reset_peaks()
        self.peak_of = defaultdict(int, self.current_of)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        owner = self.owner
        if self.owner_rule is not None:
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            owner = self.owner_rule(func, tensors)
        self._charged = owner
        if func is torch.ops.aten.add.Tensor and _is_added_in_place(*args):
            func = torch.ops.aten.add_.Tensor
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if self._scratch is not None:
            inside = self._scratch(func, args, kwargs or {})
            self.peak = max(self.peak, self.current + inside)
            self.peak_of[owner] = max(self.peak_of[owner], self.current_of[owner] + inside)
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._owners:
            return
        size, owner = storage.nbytes(), self._charged
        self._owners[storage] = owner
        self.current_of[owner] += size
        self.peak_of[owner] = max(self.peak_of[owner], self.current_of[owner])
        weakref.finalize(storage, self._remove_of, size, owner).atexit = False
        super()._add(storage)

    def _remove_of(self, size: int, owner: int) -> None:
        self.current_of[owner] -= size


def _is_added_in_place(first: Tensor, second: Any) -> bool:
    """Whether autograd is adding to a gradient that it alone holds, next to Python's storage."""
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    alike = isinstance(second, Tensor) and second.shape == first.shape
    holders = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    return alike and holders == 2
