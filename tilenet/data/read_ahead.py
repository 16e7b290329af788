"""Read ahead: a thread makes what is needed next while this one computes.

One thread, so that results come in order and files are read as they would be without it; the
results that wait are bounded, since each may be as large as a tile.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class ReadAhead(Generic[Item, Result]):
    """`map(read, items)`, made by a thread before it is asked for; an iterator, and a context.

    Leave the context before what `read` uses is closed: the thread may be in the middle of it.
    Leaving waits for that one item and drops what was not taken.

    Args:
        read: Makes a result; what it raises is raised where its result would have been taken, and
            ends the thread. Nothing else may use what it uses, unless that takes turns by itself.
        items: Items of the results, taken in the thread too, no earlier than needed.
        ahead: Most results that are under way or wait at a time; 0: no thread, each is made when it
            is taken.
    """

    def __init__(
        self,
        read: Callable[[Item], Result],
        items: Iterable[Item],
        ahead: int,
    ) -> None:
        self._read, self._items = read, iter(items)
        # Not a semaphore, which is Python: Ctrl-C in the middle of its release loses a wake-up.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(ahead):
            self._room.put(None)
        # A result, alone in a tuple; the error that ended the thread; or None: all were made.
        self._results: queue.SimpleQueue[tuple[Result] | BaseException | None] = queue.SimpleQueue()
        self._left = False
        self._thread: threading.Thread | None = None
        if ahead > 0:
            # A daemon, so that a read that never returns does not keep a job that ends alive.
            self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        if self._left:
            raise StopIteration
        if self._thread is None:
            return self._read(next(self._items))
        item = self._results.get()
        self._room.put(None)
        if isinstance(item, tuple):
            return item[0]
        self._left = True
        if item is None:
            raise StopIteration
        raise item

    def __enter__(self) -> "ReadAhead[Item, Result]":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread, after the item that it is at; what waits is dropped."""
        self._left = True
        self._room.put(None)
        if self._thread is not None:
            self._thread.join()
        while not self._results.empty():
            self._results.get()

    def _run(self) -> None:
        try:
            while True:
                self._room.get()
                if self._left:
                    return
                # Not named: a name would keep a result beyond those that are counted.
                self._results.put((self._read(next(self._items)),))
        except StopIteration:
            self._results.put(None)
        except BaseException as error:  # of any kind: it is raised where the result is taken
            self._results.put(error)
