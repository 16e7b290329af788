"""Count the bytes of the tensors that live, operation by operation.

Works alike on real tensors and on fake ones (`FakeTensorMode`), which have sizes but no memory: so
the peak of a run that would need 500 GiB is known in a fraction of a second. What operations take
for themselves inside (scratch of a convolution's backward) no tensor shows.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["LiveBytes", "ScratchRule"]

OwnerRule = Callable[[Any, list[Tensor]], int]
ScratchRule = Callable[[Any, Any, dict[str, Any]], int]


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which storages are counted from the operation that makes them until they die.

    A storage counts once, however many tensors view it. Storages that were there before do not
    count, unless they are handed to `charge`. Modes are per thread: what other threads do is not
    seen. Enter it inside of `FakeTensorMode`.

    Args:
        owner_rule: Says from an operation and its tensors to whom its new storages are charged (see
            `owner_of`); None: to the attribute `owner` at that time.
        on_change: Called behind each operation that made a storage.
        scratch: Says how many bytes an operation takes inside while it runs; they count for the
            peaks only.

    Attributes:
        owner: Number that new storages are charged to.
        current: Bytes alive now.
        peak: Most bytes that were alive at one time.
        current_of: Bytes alive now, by owner.
        peak_of: Most bytes that were alive at one time, by owner.
    """

    def __init__(
        self,
        owner_rule: OwnerRule | None = None,
        on_change: Callable[[], None] | None = None,
        scratch: ScratchRule | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = 0
        self.current = 0
        self.peak = 0
        self.current_of: dict[int, int] = defaultdict(int)
        self.peak_of: dict[int, int] = defaultdict(int)
        self.owner_rule = owner_rule
        self._on_change = on_change
        self._scratch = scratch
        # By storage object: an address is used again as soon as its storage has died.
        self._owners: Any = WeakIdKeyDictionary()

    def charge(self, tensors: Iterable[Tensor], owner: int) -> None:
        """Count the storages of tensors that were made before."""
        for tensor in tensors:
            self._add(tensor.untyped_storage(), owner)

    def owner_of(self, tensor: Tensor) -> int | None:
        """To whom a tensor's storage is charged; None: to nobody."""
        owner: int | None = self._owners.get(tensor.untyped_storage())
        return owner

    def reset_peaks(self) -> None:
        """Let the peaks start over at what lives now."""
        self.peak = self.current
        self.peak_of = defaultdict(int, self.current_of)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = _tensors((args, kwargs))
        # Makes a tensor out of Python numbers: a new storage with fake tensors, a view of one that
        # no operation made with real ones. Counted as new in both.
        lifts = func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)
        before = {} if lifts else {id(s): s for s in (x.untyped_storage() for x in given)}
        made = func(*args, **(kwargs or {}))
        owner = self.owner if self.owner_rule is None else self.owner_rule(func, given)
        changed = False
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if id(storage) not in before and storage not in self._owners:
                self._add(storage, owner)
                changed = True
        if changed and self._on_change is not None:
            self._on_change()
        if self._scratch is not None:
            inside = self._scratch(func, args, kwargs or {})
            self.peak = max(self.peak, self.current + inside)
            self.peak_of[owner] = max(self.peak_of[owner], self.current_of[owner] + inside)
        return made

    def _add(self, storage: torch.UntypedStorage, owner: int) -> None:
        if storage in self._owners:
            return
        size = storage.nbytes()
        self._owners[storage] = owner
        self.current += size
        self.current_of[owner] += size
        self.peak = max(self.peak, self.current)
        self.peak_of[owner] = max(self.peak_of[owner], self.current_of[owner])
        weakref.finalize(storage, self._remove, size, owner).atexit = False

    def _remove(self, size: int, owner: int) -> None:
        self.current -= size
        self.current_of[owner] -= size


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
