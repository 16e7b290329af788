"""Sum gradients over ranks, in pieces, while backward is still running.

All gradients of a device lie in one flat buffer, in the order in which backward completes them (the
network's last layer first), and each parameter's `.grad` is a view of it. As soon as all gradients
of a piece of about 4 MB are complete, a helper thread sums it over the ranks.

Why so: one MPI call for all gradients takes 2–3 times as long as pieces that fit the caches, a
non-blocking call makes no progress while Python computes, and MPI's own progress threads take half
of the cores. Every rank sums the pieces in the same order, whatever order they become ready in.
Where all ranks share a node's cores and none is left for a helper, there is nothing to hide sums
behind: they wait for the end of backward, and the thread that asks for them makes them.

Where ranks share out the update (`shares.py`), a rank gets the sums of its blocks alone, and the
buffer carries the new weights back.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

import torch
from torch import Tensor, nn

from tilenet.mpi import Intracomm
from tilenet.parallel.sums.meanwhile import sums_pay_meanwhile
from tilenet.parallel.sums.shares import Shares, block, values_of_piece, whole_blocks
from tilenet.parallel.sums.transports import Transport, open_transport

PIECE_BYTES = 4 << 20


class _Ready:
    """A piece whose gradients are complete as soon as its device has done what it was given.

    Backward's thread only leaves a mark in the device's queue and goes on; the helper waits for it.
    """

    def __init__(self, piece: Tensor | None) -> None:
        self.piece = piece
        self._mark: torch.Event | None = None
        if piece is not None and piece.device.type != "cpu":
            queued = torch.get_device_module(piece.device).current_stream(piece.device)
            self._mark = queued.record_event()

    def wait(self) -> None:
        if self._mark is not None:
            self._mark.synchronize()


class GradientSum:
    """Sums the gradients of `parameters` over `comm`. Collective to make, `finish` and `close`.

    A step is: any number of backward passes; `arm()` before the last one; `finish()`.

    Args:
        parameters: In the network's order, of one dtype; those of a device follow one another.
        comm: Ranks that hold the same parameters on as many devices.
        pieces: Bytes of a piece, where each rank updates all parameters; or the ranks' shares of
            the update, which say it too.
        transport: How pieces are summed; see `transports.open_transport`.
        meanwhile: Whether sums are made while backward runs; None: as `sums_pay_meanwhile` says.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        comm: Intracomm,
        pieces: int | Shares = PIECE_BYTES,
        transport: str = "auto",
        *,
        meanwhile: bool | None = None,
    ) -> None:
        self._parameters = parameters[::-1]
        shares = pieces if isinstance(pieces, Shares) else None
        piece_bytes = pieces.piece_bytes if isinstance(pieces, Shares) else pieces
        self._comm, self._shares = comm, shares
        self._flats: list[Tensor] = []
        self._views: list[Tensor] = []
        self._pieces: list[Tensor] = []
        self._pieces_of: list[range] = []
        for _, group in groupby(self._parameters, key=lambda parameter: parameter.device):
            self._lay_out(list(group), piece_bytes)
        self._updated = self._flats
        if shares is not None:
            self._updated = [block(piece, comm) for piece in self._pieces]
            for gradient, own in self._own(shares):
                own.grad = gradient
        self._marks: list[tuple[nn.Parameter, Tensor, int]] = []
        self._are_zeros = False
        self._missing: list[int] = []
        self._waiting: list[int] = []
        self._armed = False
        self._lock = threading.Lock()  # each device's backward runs in a thread of its own
        self._ready: queue.SimpleQueue[_Ready | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._helper: threading.Thread | None = None
        self._transport: Transport | None = None
        self.wait_seconds = 0.0
        if comm.size > 1:
            self._transport = open_transport(transport, comm, self._pieces)
            if meanwhile is None:
                on_devices = any(flat.device.type != "cpu" for flat in self._flats)
                meanwhile = sums_pay_meanwhile(comm, on_devices=on_devices)
            if meanwhile:
                self._helper = threading.Thread(target=self._sum_pieces, daemon=True)
                self._helper.start()

    def _lay_out(self, parameters: list[nn.Parameter], piece_bytes: int) -> None:
        """Make gradients of a device views of one buffer; note the pieces that each lies in."""
        ranks = 1 if self._shares is None else self._comm.size
        total = whole_blocks(sum(parameter.numel() for parameter in parameters), ranks)
        flat = torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device)
        size = values_of_piece(piece_bytes, flat.element_size(), ranks)
        before = len(self._pieces)
        start = 0
        for parameter in parameters:
            stop = start + parameter.numel()
            # With a version of its own, so that sums on the way are not taken for a change.
            self._views.append(flat[start:stop].view_as(parameter).data)
            parameter.grad = self._views[-1]
            self._pieces_of.append(range(before + start // size, before - (-stop // size)))
            hook = self._hook(len(self._pieces_of) - 1)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            start = stop
        self._flats.append(flat)
        self._pieces.extend(flat[at : at + size] for at in range(0, total, size))

    def _own(self, shares: Shares) -> Iterator[tuple[Tensor, nn.Parameter]]:
        """Gradients and weights of the parts that this rank updates."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            for part, own in shares.own_of.get(parameter, []):
                yield view.view(-1)[part.start : part.stop], own

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def completed(_: Tensor) -> None:
            with self._lock:
                if self._armed:
                    self._waiting[index] -= 1
                    if self._waiting[index] == 0:
                        self._complete(index)

        return completed

    def zero(self) -> None:
        """Set all gradients to zero in place, and make them `.grad` again where replaced."""
        for flat in self._flats:
            flat.zero_()
        self.keep()
        self.mark()
        self._are_zeros = True

    def keep(self) -> None:
        """Make the gradients `.grad`, whatever a program made of it.

        Parameters that are fixed now have none, so that no optimizer moves them.
        """
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view if parameter.requires_grad else None

    def mark(self) -> None:
        """Note the gradients as they are now, after a backward pass."""
        self._are_zeros = False
        pairs = zip(self._parameters, self._views, strict=True)
        self._marks = [(p, view, view._version) for p, view in pairs if p.grad is view]

    @property
    def changed(self) -> bool:
        """Whether a program changed gradients after `mark`, or made them other than 0 after `zero`.

        Changes that torch does not count, as by `.data`, are not noticed.
        """
        touched = [p.grad for p, v, now in self._marks if p.grad is not v or v._version != now]
        if self._are_zeros:
            return any(gradient is not None and bool(gradient.any()) for gradient in touched)
        return bool(touched)

    def lacks(self, parameters: Iterable[Tensor]) -> bool:
        """Whether a gradient is wanted of a parameter that is not summed."""
        summed = set(map(id, self._parameters))
        return any(p.requires_grad and id(p) not in summed for p in parameters)

    def divide(self, divisor: float) -> None:
        """Divide in place all gradients with which this rank updates weights."""
        for gradient in self._updated:
            gradient.div_(divisor)

    def clip(self, most: float) -> float:
        """Scale all gradients in place to a norm of at most `most`; return the norm before.

        It is the root of the sum of all their squares, over the devices of this rank. Each
        parameter's sum is taken by itself in float64, and the total is exact: it does not depend on
        which parameters share a device. If ranks share out the update, blocks are taken by
        themselves, and their sum over all ranks is exact. Collective then.
        """
        groups = groupby(self._gradients(), key=lambda gradient: gradient.device)
        norms = [
            torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in group]).tolist()
            for _, group in groups
        ]
        squares = [value * value for group in norms for value in group]
        if self._shares is not None:
            squares = [
                square for rank_squares in self._comm.allgather(squares) for square in rank_squares
            ]
        norm = math.sqrt(math.fsum(squares))
        if norm > most:
            for gradient in self._updated:
                gradient.mul_(most / norm)
        return norm

    def _gradients(self) -> list[Tensor]:
        if self._shares is not None:
            return self._updated
        return [p.grad for p in self._parameters if p.grad is not None]

    @property
    def transport(self) -> str:
        """How pieces travel between ranks; `none` where there is one rank."""
        return "none" if self._transport is None else self._transport.name

    @property
    def finite(self) -> bool:
        """Whether no gradient is infinite or NaN; after `finish` the same on all ranks.

        Collective where ranks share out the update.
        """
        finite = all(bool(gradient.isfinite().all()) for gradient in self._updated)
        return finite if self._shares is None else all(self._comm.allgather(finite))

    def arm(self, passes: int = 1) -> None:
        """Say that the next backward pass is this rank's last of the step.

        Args:
            passes: How often it adds to each gradient: once, or under checkpointing once for each
                micro-batch.
        """
        self._missing = [0] * len(self._pieces)
        for pieces in self._pieces_of:
            for piece in pieces:
                self._missing[piece] += 1
        self._waiting = [passes] * len(self._parameters)
        self._next = 0
        self._armed = True

    def _complete(self, index: int) -> None:
        for number in self._pieces_of[index]:
            self._missing[number] -= 1
        # Only in order: each rank must sum the same piece at the same time.
        while self._next < len(self._pieces) and self._missing[self._next] == 0:
            if self._helper is not None:
                self._ready.put(_Ready(self._pieces[self._next]))
            self._next += 1

    def finish(self) -> None:
        """Wait until all gradients are summed over the ranks. Collective."""
        if not self._armed:
            self.arm()  # a rank without tiles adds its zeros
        with self._lock:
            for index, passes in enumerate(self._waiting):
                if passes > 0:
                    self._complete(index)
            self._armed = False
        began = time.perf_counter()
        if self._helper is not None:
            self._ready.put(None)
            error = self._done.get()
            if error is not None:
                raise error
        elif self._transport is not None:
            for piece in self._pieces:
                self._sum(_Ready(piece), piece)
        self.wait_seconds = time.perf_counter() - began

    def _sum(self, ready: _Ready, piece: Tensor) -> None:
        assert self._transport is not None
        ready.wait()
        if self._shares is None:
            self._transport.sum(piece)
        else:
            self._transport.sum_own(piece)

    @torch.no_grad()
    def share_weights(self) -> None:
        """Give all ranks the weights that each has updated; gradients are gone. Collective.

        Does nothing where each rank updates all.
        """
        if self._shares is None or self._transport is None:
            return
        began = time.perf_counter()
        for gradient, own in self._own(self._shares):
            gradient.copy_(own)
        for piece in self._pieces:
            _Ready(piece).wait()
            self._transport.gather(piece)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.copy_(view)
        self.wait_seconds += time.perf_counter() - began

    def _sum_pieces(self) -> None:
        # A thread begins on device 0, where waiting for another's event makes a stray context.
        device = self._flats[0].device
        torch.get_device_module(device).set_device(device)
        while True:
            error: BaseException | None = None
            try:
                while (ready := self._ready.get()) is not None:
                    if ready.piece is None:
                        return
                    self._sum(ready, ready.piece)
            except BaseException as raised:
                error = raised
            self._done.put(error)

    def close(self) -> None:
        """End the helper thread and give the transport back. Collective."""
        if self._helper is not None:
            self._ready.put(_Ready(None))
            self._helper.join()
        if self._transport is not None:
            self._transport.close()
