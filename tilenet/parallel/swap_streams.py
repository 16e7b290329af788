"""Copies between a device and its host, beside what the device computes.

Each direction has a stream of its own, so that both lanes of the link are used. Events order them
with the computation, and not `record_stream` alone: with it memory comes back at times that nobody
can foretell. Where there is no device a copy is done when it returns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Arrival", "CopyStreams"]


@dataclass
class Arrival:
    """A copy to a device, under way or done.

    Attributes:
        event: Its end.
        owner: Stream that the memory was allocated on.
    """

    event: torch.cuda.Event
    owner: torch.cuda.Stream

    def before_use(self, tensor: Tensor) -> None:
        """Let the stream under way wait for the bytes of a tensor."""
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(self.event)
        if stream != self.owner:
            tensor.record_stream(stream)

    def before_drop(self) -> None:
        """Let nobody get this memory while the copy still writes to it."""
        self.owner.wait_event(self.event)


class CopyStreams:
    """Two streams per device, made when they are first needed."""

    def __init__(self) -> None:
        self._of: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def send(self, flat: Tensor, host: Tensor) -> torch.cuda.Event | None:
        """Begin to copy to the host.

        Args:
            flat: uint8, on any device; must live until the event.
            host: uint8, as many.

        Returns:
            The end of the copy; None: it is done.
        """
        if flat.device.type != "cuda":
            host.copy_(flat)
            return None
        # Asked before `with stream`, inside of which the answer is that stream: the wait would be
        # for nothing, and the copy of values that are not there yet.
        computing = torch.cuda.current_stream(flat.device)
        out, _ = self._streams(flat.device)
        out.wait_stream(computing)
        with torch.cuda.stream(out):
            host.copy_(flat, non_blocking=True)
            event: torch.cuda.Event = out.record_event()
            return event

    def fetch(
        self, host: Tensor, device: torch.device, sent: torch.cuda.Event | None
    ) -> tuple[Tensor, Arrival | None]:
        """Begin to copy from the host.

        Args:
            sent: End of the copy that brought the bytes there, from whichever device; None: they
                are there.

        Returns:
            The bytes on the device, and when they are there; None: they are.
        """
        flat = torch.empty(host.shape, dtype=torch.uint8, device=device)
        if device.type != "cuda":
            flat.copy_(host)
            return flat, None
        computing = torch.cuda.current_stream(device)
        _, back = self._streams(device)
        back.wait_stream(computing)  # which may still use the memory that `flat` has got
        if sent is not None:
            back.wait_event(sent)
        with torch.cuda.stream(back):
            flat.copy_(host, non_blocking=True)
            return flat, Arrival(back.record_event(), computing)

    def _streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if device not in self._of:
            out, back = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
            self._of[device] = (out, back)
        return self._of[device]
