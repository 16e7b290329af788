"""Tensors that autograd keeps for backward live elsewhere until they are needed.

A hook sees each tensor that an operation saves. What is beyond `limit_bytes` goes out, that first
which backward is expected to need last: the oldest, unless an earlier step went otherwise. On the
way back the next few are fetched ahead.

Whole storages move, since views share them, and they are told apart by object, never by address,
which is used again as soon as a storage is gone. Writing over a tensor that backward needs is an
error as without hooks. Writing through `.data` is not noticed, with hooks or without; a storage
that was written so and is saved once more is taken for the one that went out before.
"""

import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from tilenet.parallel.swap.copies import HostCopies
from tilenet.parallel.swap.host_pool import Slabs
from tilenet.parallel.swap.saved import KeptTensor, SavedStorage, SavedTensor, Watch
from tilenet.parallel.swap.saved_order import LearnedOrder, SavedOrder
from tilenet.parallel.swap.statistics import SwapStatistics


class Swapper:
    """Keeps what autograd saves within a limit; `pack` and `unpack` are autograd's hooks.

    Threads may share one, and several graphs may live at a time.

    Args:
        limit_bytes: Most bytes of saved storages on their devices; beyond it they go out. None:
            no storage goes out.
        min_bytes: Smaller storages stay, and do not count.
        lookahead: Storages that are fetched ahead in backward, as far as the limit allows.
        slabs: The pool to which they go; closed by `close`.
        in_flight: As for `HostCopies`.

    Attributes:
        statistics: Counts of copies and bytes so far.
        copies: The copies in the pool; other code may send its tensors there too.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        min_bytes: int,
        lookahead: int,
        slabs: Slabs,
        in_flight: Mapping[torch.device, float] | None = None,
    ) -> None:
        self.limit_bytes, self.min_bytes, self.lookahead = limit_bytes, min_bytes, lookahead
        self.statistics = SwapStatistics()
        self.copies = HostCopies(slabs, self.statistics, in_flight)
        self._closing = False
        self._lock = threading.Lock()
        self._learned = LearnedOrder()
        self._here, self._out = SavedOrder(), SavedOrder()
        self._known: Any = WeakIdKeyDictionary()  # storage -> its SavedStorages
        self._freed: deque[tuple[SavedStorage, int]] = deque()

    def pack(self, tensor: Tensor) -> KeptTensor | SavedTensor:
        """The object that autograd holds instead of a tensor.

        Raises:
            TilenetError: The pool has no room.
        """
        with torch.no_grad():
            if self._closing or not self._may_go(tensor):
                return KeptTensor(tensor)
            watch = Watch(tensor)
            with self._locked():
                if not len(self._here) + len(self._out):
                    self._learned.end_step()
                storage = self._storage_of(tensor, watch)
                number = self._learned.number(storage.num_bytes)
                self._number(storage, number)
                saved = SavedTensor(tensor, watch, storage, number, self._free)
                self._make_room(0)
                self.statistics.note_peaks()
            return saved

    def unpack(self, saved: KeptTensor | SavedTensor) -> Tensor:
        """The tensor that was packed, or one with the same bytes in the same layout.

        Raises:
            RuntimeError: It was written over.
        """
        if isinstance(saved, KeptTensor):
            return saved.get()
        with torch.no_grad(), self._locked():
            saved.watch.check()  # not while `counts_with` changes it
            self._learned.need(saved.number)
            tensor = saved.on(self._fetch(saved.storage))
            if saved.storage.arrival is not None:
                saved.storage.arrival.before_use(tensor)
            self._fetch_ahead(saved.number)
            self.statistics.note_peaks()
        return tensor

    def close(self) -> None:
        """Give the host's memory or file back, once no graph needs it any more."""
        self._closing = True
        with self._locked():  # which looks whether any does
            pass

    def _may_go(self, tensor: Tensor) -> bool:
        # Subclasses (fake tensors among them) know more than their bytes, and so do the bits of
        # lazy conjugation and negation.
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        plain = plain and not tensor._is_zerotensor()  # of forward-mode gradients: without memory
        if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return False
        num_bytes, base = tensor.untyped_storage().nbytes(), tensor._base
        # A parameter's view, as a linear layer's transposed weight, or a batch out of a data set:
        # the caller holds what they view.
        if isinstance(base, nn.Parameter):
            return False
        if base is not None and base.is_leaf and 2 * tensor.nbytes < num_bytes:
            return False
        return num_bytes >= max(self.min_bytes, 1) and self.copies.suits(tensor.device)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                self._settle()
                yield
        finally:
            self._settle_if_unlocked()

    def _free(self, storage: SavedStorage, number: int) -> None:
        # Python may free a graph anywhere, inside of our own locked parts too: so never wait.
        self._freed.append((storage, number))
        self._settle_if_unlocked()

    def _settle_if_unlocked(self) -> None:
        while self._freed and self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Drop storages that autograd needs no more."""
        while self._freed:
            storage, number = self._freed.popleft()
            order = self._here if storage.here is not None else self._out
            order.remove(storage)
            storage.numbers.remove(number)
            if storage.numbers:
                order.add(storage)
                continue
            self._drop(storage)
            if storage.copy is not None:
                self.copies.release(storage.copy)
            known = storage.known()
            if known is not None and known in self._known:
                self._known[known].remove(storage)
        if self._closing and not len(self._here) + len(self._out):
            self.copies.close()

    def _storage_of(self, tensor: Tensor, watch: Watch) -> SavedStorage:
        storage = tensor.untyped_storage()
        known: list[SavedStorage] = self._known.setdefault(storage, [])
        for saved in known:
            if saved.watch.expected == watch.expected and saved.watch.counts_with(watch):
                return saved
        known.append(SavedStorage(storage, watch, tensor.device))
        self.statistics.active_bytes += storage.nbytes()
        return known[-1]

    def _number(self, storage: SavedStorage, number: int) -> None:
        order = self._here if storage.here is not None else self._out
        if storage.numbers:
            order.remove(storage)
        insort(storage.numbers, number)
        order.add(storage)

    def _make_room(self, num_bytes: int) -> None:
        """Send out storages that backward needs last, until `num_bytes` more keep the limit."""
        while self.limit_bytes is not None:
            last = self._here.needed_last()
            if last is None or self.statistics.active_bytes + num_bytes <= self.limit_bytes:
                return
            self._send(last)

    def _send(self, storage: SavedStorage) -> None:
        assert storage.here is not None
        if storage.copy is None:
            storage.copy = self.copies.send(storage.here)
        self._here.remove(storage)
        self._drop(storage)
        self._out.add(storage)

    def _fetch(self, storage: SavedStorage) -> torch.UntypedStorage:
        if storage.here is not None:
            return storage.here
        here = storage.known()  # code outside may have kept it
        self._make_room(storage.num_bytes)
        if here is None:
            assert storage.copy is not None
            here, storage.arrival = self.copies.fetch(storage.copy, storage.device)
        self._out.remove(storage)
        storage.here, storage.known = here, weakref.ref(here)
        self._here.add(storage)
        self.statistics.active_bytes += storage.num_bytes
        return here

    def _fetch_ahead(self, number: int) -> None:
        for _ in range(self.lookahead):
            candidates = [order.needed_after(number) for order in (self._here, self._out)]
            following = [storage for storage in candidates if storage is not None]
            if not following or self.limit_bytes is None:
                return
            storage = max(following, key=lambda saved: saved.next_need)
            number = storage.next_need
            if storage.here is None:
                if self.statistics.active_bytes + storage.num_bytes > self.limit_bytes:
                    return
                self._fetch(storage)

    def _drop(self, storage: SavedStorage) -> None:
        if storage.here is not None:
            if storage.arrival is not None:
                storage.arrival.before_drop()
            storage.here = None
            self.statistics.active_bytes -= storage.num_bytes
