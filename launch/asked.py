"""What a batch system, or somebody, asks of a job by signals."""

import signal

__all__ = ["Asked"]


class Asked:
    """What was asked for so far.

    Attributes:
        room: To make room (USR1, or an alarm that was set): stop, and come back.
        end: To end (TERM), as somebody cancels the job: stop, and do not come back.
    """

    def __init__(self, room: bool = False, end: bool = False) -> None:
        self.room, self.end = room, end

    def __bool__(self) -> bool:
        return self.room or self.end

    def listen(self) -> None:
        """Catch signals from now on; Ctrl-C, which reaches the launcher as well, ends all."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, lambda *_: self._set("room"))
        signal.signal(signal.SIGTERM, lambda *_: self._set("end"))
        signal.signal(signal.SIGALRM, lambda *_: self._set("room"))

    def _set(self, name: str) -> None:
        setattr(self, name, True)
