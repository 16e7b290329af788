"""Count the bytes of the tensors that live, operation by operation.

Works alike on real tensors and on fake ones (`FakeTensorMode`), which have sizes but no memory: so
the peak of a run that would need 500 GiB is known in a fraction of a second. Memory that operations
take inside (scratch of a convolution's backward) is in no tensor, and is not counted.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts storages from the operation that makes them until they die.

    A storage counts once, however many tensors view it. Storages that were there before do not
    count, unless they are handed to `charge`. Modes are per thread: operations of other threads are
    not seen. Enter it inside of `FakeTensorMode`.

    Args:
        on_change: Called behind each operation that made a storage.

    Attributes:
        current: Bytes alive now.
        peak: Most bytes that were alive at one time.
    """

    def __init__(self, on_change: Callable[[], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self._on_change = on_change
        # By storage object: an address is used again as soon as its storage has died.
        self._counted: Any = WeakIdKeyDictionary()

    def charge(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors that were made before."""
        for tensor in tensors:
            self._add(tensor.untyped_storage())

    def reset_peaks(self) -> None:
        """Let the peak start over at the bytes alive now."""
        self.peak = self.current

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = _tensors((args, kwargs))
        # Makes a tensor out of Python numbers: a new storage with fake tensors, a view of one that
        # no operation made with real ones. Counted as new in both.
        lifts = func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)
        before = {} if lifts else {id(s): s for s in (x.untyped_storage() for x in inputs)}
        outputs = func(*args, **(kwargs or {}))
        changed = False
        for tensor in _tensors(outputs):
            storage = tensor.untyped_storage()
            if id(storage) not in before and storage not in self._counted:
                self._add(storage)
                changed = True
        if changed and self._on_change is not None:
            self._on_change()
        return outputs

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._counted:
            return
        size = storage.nbytes()
        self._counted[storage] = size
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._remove, size).atexit = False

    def _remove(self, size: int) -> None:
        self.current -= size


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
