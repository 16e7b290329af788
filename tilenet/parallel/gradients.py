"""Sum gradients over ranks, in pieces, while backward is still running.

All gradients lie in one flat buffer, in the order in which backward completes them (the network's
last layer first), and each parameter's `.grad` is a view of it. As soon as all gradients of a piece
of about 4 MB are complete, a helper thread sums it over the ranks with its own communicator.

Why so: one MPI call for all gradients takes 2–3 times as long as pieces that fit the caches, a
non-blocking call makes no progress while Python computes, and MPI's own progress threads take half
of the cores. Every rank sums the pieces in the same order, whatever order they become ready in.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["GradientSum"]

PIECE_BYTES = 4 << 20


class GradientSum:
    """Sums the gradients of `parameters` over `comm`. Collective to make, `finish` and `close`.

    A step is: any number of backward passes; `arm()` before the last one; `finish()`.

    Args:
        parameters: In the network's order, on one device, of one dtype.
        comm: Is duplicated, so that its messages meet nobody else's.
        piece_bytes: Size of the pieces.
    """

    def __init__(
        self, parameters: list[nn.Parameter], comm: "MPI.Intracomm", piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._comm = comm.Dup()
        self._parameters = parameters[::-1]
        first = parameters[0]
        total = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(total, dtype=first.dtype, device=first.device)
        size = max(1, piece_bytes // self.flat.element_size())
        self._pieces = [(a, min(a + size, total)) for a in range(0, total, size)]
        self._pieces_of = self._lay_out(size)
        self._missing: list[int] = []
        self._armed = False
        self._ready: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._helper: threading.Thread | None = None
        self._host = torch.empty(0)
        self.wait_seconds = 0.0
        if self._comm.size > 1:
            if self.flat.is_cuda:
                self._host = torch.empty(size, dtype=first.dtype, pin_memory=True)
            self._helper = threading.Thread(target=self._sum_pieces, daemon=True)
            self._helper.start()

    def _lay_out(self, size: int) -> list[range]:
        """Make gradients views of the buffer; return the pieces that each parameter lies in."""
        start = 0
        pieces_of = []
        for index, parameter in enumerate(self._parameters):
            stop = start + parameter.numel()
            parameter.grad = self.flat[start:stop].view_as(parameter)
            pieces_of.append(range(start // size, -(-stop // size)))
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            start = stop
        return pieces_of

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def completed(_: Tensor) -> None:
            if self._armed:
                self._complete(index)

        return completed

    def zero(self) -> None:
        """Set all gradients to zero, in place."""
        self.flat.zero_()

    def arm(self) -> None:
        """Say that the next backward pass is this rank's last of the step."""
        self._missing = [0] * len(self._pieces)
        for pieces in self._pieces_of:
            for piece in pieces:
                self._missing[piece] += 1
        self._waiting = set(range(len(self._parameters)))
        self._next = 0
        self._armed = True

    def _complete(self, index: int) -> None:
        if index not in self._waiting:
            return
        self._waiting.discard(index)
        for piece in self._pieces_of[index]:
            self._missing[piece] -= 1
        # Only in order: each rank must sum the same piece at the same time.
        while self._next < len(self._pieces) and self._missing[self._next] == 0:
            if self.flat.is_cuda:
                # The copy to the host must not overtake the kernels that write the gradient.
                torch.cuda.current_stream(self.flat.device).synchronize()
            self._ready.put(self._next)
            self._next += 1

    def finish(self) -> None:
        """Wait until all gradients are summed over the ranks. Collective."""
        if not self._armed:
            self.arm()  # a rank without tiles adds its zeros
        for index in sorted(self._waiting):
            self._complete(index)
        self._armed = False
        began = time.perf_counter()
        if self._helper is not None:
            self._ready.put(None)
            error = self._done.get()
            if error is not None:
                raise error
        else:
            while not self._ready.empty():
                self._ready.get()
        self.wait_seconds = time.perf_counter() - began

    def _sum_pieces(self) -> None:
        from mpi4py import MPI

        while True:
            error: BaseException | None = None
            try:
                while (piece := self._ready.get()) is not None:
                    if piece < 0:
                        return
                    start, stop = self._pieces[piece]
                    part = self.flat[start:stop]
                    host = self._host[: stop - start].copy_(part) if part.is_cuda else part
                    self._comm.Allreduce(MPI.IN_PLACE, host.numpy())
                    if part.is_cuda:
                        part.copy_(host)
            except BaseException as raised:
                error = raised
            self._done.put(error)

    def close(self) -> None:
        """End the helper thread and give the communicator back. Collective."""
        if self._helper is not None:
            self._ready.put(-1)
            self._helper.join()
        self._comm.Free()
