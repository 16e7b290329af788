"""Signals with which a batch system, or a user, stops a job."""

import signal


class StopSignals:
    """Signals that came so far.

    Attributes:
        requeue: USR1, or an alarm that was set: stop, and come again.
        cancel: TERM: stop, and do not come again.
    """

    def __init__(self, requeue: bool = False, cancel: bool = False) -> None:
        self.requeue, self.cancel = requeue, cancel

    def __bool__(self) -> bool:
        return self.requeue or self.cancel

    def listen(self) -> None:
        """Catch signals from now on; Ctrl-C, which reaches the launcher as well, ends all."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, lambda *_: self._set("requeue"))
        signal.signal(signal.SIGTERM, lambda *_: self._set("cancel"))
        signal.signal(signal.SIGALRM, lambda *_: self._set("requeue"))

    def _set(self, name: str) -> None:
        setattr(self, name, True)
