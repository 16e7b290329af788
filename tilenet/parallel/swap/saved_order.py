"""The order in which backward needs saved tensors, learnt from the steps before.

On one thread, autograd by itself needs the tensor first that was saved last, with branches too.
Programs differ: two graphs whose backward runs in the order of their forward, heads with losses of
their own, tensors that are saved and never needed, pipelines that hand micro-batches on.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

from tilenet.parallel.swap.saved import SavedStorage


class SavedOrder:
    """Storages in the order in which backward needs them, the one that is needed last first.

    A storage must be taken out before its numbers change.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._of: dict[int, SavedStorage] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, storage: SavedStorage) -> None:
        """Insert a storage in order."""
        insort(self._numbers, storage.next_need)
        self._of[storage.next_need] = storage

    def remove(self, storage: SavedStorage) -> None:
        """Remove a storage."""
        del self._numbers[bisect_left(self._numbers, storage.next_need)]
        del self._of[storage.next_need]

    def needed_last(self) -> SavedStorage | None:
        """The storage that is needed last, if there is any."""
        return self._of[self._numbers[0]] if self._numbers else None

    def needed_after(self, number: int) -> SavedStorage | None:
        """The storage that is needed next after the tensor of that number."""
        place = bisect_left(self._numbers, number)
        return self._of[self._numbers[place - 1]] if place else None


MOST_STEPS = 8  # remembered steps; as many sizes of images may take turns


MOST_TENSORS = 1 << 16  # tensors of a step, which never ends if some graph is always alive


@dataclass(frozen=True)
class _Step:
    """The tensors of a step in the order of saving, from the first until none was alive.

    Attributes:
        sizes: Sizes of their storages, in bytes.
        ranks: Ranks 0 … n − 1; the larger, the sooner the tensor was needed.
        needed: Number of tensors that were needed at all.
    """

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    needed: int


class LearnedOrder:
    """Numbers tensors that are saved: the larger, the sooner one is expected to be needed.

    Tensors of a step that looks like an earlier one, by the sizes of what it saved so far, get
    numbers in the order in which that one needed them. The others get them in the order of saving.
    A number is never given twice. Nothing but speed depends on whether expectations come true.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[int, ...], _Step] = {}  # the latest last
        self._next = 0  # above all numbers in use, and those that are reserved
        self._begin()

    def _begin(self) -> None:
        self._sizes: list[int] = []
        self._numbers: list[int] = []
        self._needed: dict[int, int] = {}  # number -> its place in the order of needs
        self._like: _Step | None = None
        self._base = 0

    def end_step(self) -> None:
        """End a step: no saved tensor is alive any more."""
        if self._needed and len(self._numbers) < MOST_TENSORS:
            sizes, known = tuple(self._sizes), self._steps.pop(tuple(self._sizes), None)
            # A backward through a part of the graph tells less than one through all of it.
            if known is None or len(self._needed) >= known.needed:
                known = _Step(sizes, self._ranks(), len(self._needed))
            self._steps[sizes] = known
            for oldest in list(self._steps)[:-MOST_STEPS]:
                del self._steps[oldest]
        self._begin()

    def number(self, num_bytes: int) -> int:
        """The number of the next tensor, which is saved on a storage of `num_bytes`."""
        place = len(self._numbers)
        if place >= MOST_TENSORS:
            return self._above()
        self._sizes.append(num_bytes)
        if not place or (self._like is not None and self._like.sizes[place:][:1] != (num_bytes,)):
            self._like = self._lookalike()
        number = self._above() if self._like is None else self._base + self._like.ranks[place]
        self._numbers.append(number)
        return number

    def need(self, number: int) -> None:
        """Note that backward needs the tensor of that number now."""
        if len(self._numbers) < MOST_TENSORS:
            self._needed.setdefault(number, len(self._needed))

    def _above(self) -> int:
        self._next += 1
        return self._next - 1

    def _lookalike(self) -> _Step | None:
        so_far = tuple(self._sizes)
        for step in reversed(self._steps.values()):
            if step.sizes[: len(so_far)] == so_far:
                self._base, self._next = self._next, self._next + len(step.sizes)
                return step
        return None

    def _ranks(self) -> tuple[int, ...]:
        never = len(self._numbers)
        needs = [self._needed.get(number, never) for number in self._numbers]
        ranks = [0] * len(needs)
        last_first = sorted(range(len(needs)), key=needs.__getitem__, reverse=True)
        for rank, place in enumerate(last_first):
            ranks[place] = rank
        return tuple(ranks)
