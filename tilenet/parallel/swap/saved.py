"""The swapper's record of a storage, and the objects that autograd holds instead of tensors."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from tilenet.parallel.swap.copies import Arrival, HostCopy


class Watch:
    """A tensor's version, which must stay what it is: autograd's own check is off under hooks.

    Args:
        tensor: Its memory is not held.

    Attributes:
        expected: The version.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.expected = tensor._version
        self._shape = list(tensor.shape)
        # Shares the count of versions, as all detached tensors do; then its bytes are let go.
        self._counter = tensor.detach()
        self._counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def counts_with(self, other: "Watch") -> bool:
        """Whether tensors have one count of versions, which says when either is written over.

        Parts of `torch.unsafe_chunk`, as of a GRU's gates, have one each on one storage.
        """
        before = other._counter._version
        with torch.autograd._unsafe_preserve_version_counter(self._counter):  # type: ignore[attr-defined]
            self._counter.zero_()
            return bool(other._counter._version != before)

    def check(self) -> None:
        """Check that the tensor was not written over.

        Raises:
            RuntimeError: It was; in autograd's words.
        """
        _check(self._counter, self.expected, self._shape)


class KeptTensor:
    """A tensor that stays where it is; only its version is watched."""

    def __init__(self, tensor: Tensor) -> None:
        # Detached: a result that is held by the operation that made it would never be freed.
        self._tensor, self._expected = tensor.detach(), tensor._version

    def get(self) -> Tensor:
        """The tensor as it was saved.

        Raises:
            RuntimeError: It was written over.
        """
        _check(self._tensor, self._expected, list(self._tensor.shape))
        return self._tensor


def _check(tensor: Tensor, expected: int, shape: list[int]) -> None:
    if tensor._version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{tensor.type()} {shape}] is at version {tensor._version}; expected "
            f"version {expected} instead"
        )


class SavedStorage:
    """A storage that backward needs: on its device, or elsewhere, or both.

    Attributes:
        num_bytes: Size of the storage.
        watch: Watch on the first tensor that it was saved for; others have that version too.
        device: The device of the tensors.
        here: The storage on that device, while the swapper keeps it there.
        known: The latest storage object, which code outside may keep alive.
        copy: Its copy in the pool; None if it was never sent.
        arrival: Arrival of the latest copy back.
        numbers: Numbers of the tensors on it that autograd holds, in ascending order.
    """

    def __init__(self, storage: torch.UntypedStorage, watch: Watch, device: torch.device) -> None:
        self.num_bytes, self.watch, self.device = storage.nbytes(), watch, device
        self.here: torch.UntypedStorage | None = storage
        self.known = weakref.ref(storage)
        self.copy: HostCopy | None = None
        self.arrival: Arrival | None = None
        self.numbers: list[int] = []

    @property
    def next_need(self) -> int:
        """Number of the tensor that backward is expected to need it for first."""
        return self.numbers[-1]


class SavedTensor:
    """The object that autograd holds instead of a tensor whose storage may go out.

    Args:
        tensor: Tensor to be built again, on the same part of the storage and in the same layout.
        watch: Watch on the tensor's version.
        storage: Storage of the tensor.
        number: The larger, the sooner backward is expected to need it.
        on_free: Called when autograd needs it no more.
    """

    def __init__(
        self,
        tensor: Tensor,
        watch: Watch,
        storage: SavedStorage,
        number: int,
        on_free: Callable[[SavedStorage, int], None],
    ) -> None:
        self.storage, self.number, self._on_free = storage, number, on_free
        self.watch = watch
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._shape, self._stride = tensor.shape, tensor.stride()

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor, on a storage with the same bytes."""
        empty = torch.empty(0, dtype=self._dtype, device=storage.device)
        return empty.set_(storage, self._offset, self._shape, self._stride)

    def __del__(self) -> None:
        self._on_free(self.storage, self.number)
