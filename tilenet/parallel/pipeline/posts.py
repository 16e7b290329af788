"""Messages between partitions that each work in a thread, and the end of all where one fails."""

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from tilenet.model.gpipe import use_device

_ENDED = object()  # sent in place of a message


class _Ended(Exception):
    """Another partition ended before its time."""


class Posts(dict[tuple[int, int], SimpleQueue[Any]]):
    """Messages from each of `count` partitions to each other, by the numbers of both.

    Attributes:
        errors: Errors of partitions, the first one first.
    """

    def __init__(self, count: int) -> None:
        super().__init__(
            {(sender, to): SimpleQueue() for sender in range(count) for to in range(count)}
        )
        self.errors = list[BaseException]()

    def work(self, device: torch.device, task: Callable[[], None]) -> None:
        """Do a partition's work, in its thread; an error ends all partitions."""
        try:
            with use_device(device):
                task()
        except _Ended:
            pass
        except BaseException as error:
            self.errors.append(error)
            self.end()

    def end(self) -> None:
        """End all partitions that wait for a message, now or later."""
        for queue in self.values():
            queue.put(_ENDED)


class PartitionWorker:
    """A partition that sends messages to others, and receives theirs."""

    def __init__(self, number: int, posts: Posts) -> None:
        self.number, self.posts = number, posts

    def _send(self, other: int, message: Any) -> None:
        self.posts[self.number, other].put(message)

    def _send_all(self, messages: dict[int, Any]) -> None:
        """Send messages, and hold none of their tensors: answers may come at once."""
        for other in list(messages):
            self._send(other, messages.pop(other))

    def _receive(self, other: int) -> Any:
        message = self.posts[other, self.number].get()
        if message is _ENDED:
            raise _Ended
        return message
