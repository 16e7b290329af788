"""A save that goes on in a thread of its own while the run does; at most one at a time."""

import threading
from collections.abc import Callable

__all__ = ["BackgroundSave"]


class BackgroundSave:
    """Runs saves one after another; an error of one is kept until somebody waits for it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether the last save failed; `wait` says why."""
        return self._error is not None

    def start(self, save: Callable[[], object]) -> None:
        """Begin a save, after the one before.

        Raises:
            BaseException: Of the one before.
        """
        self.wait()
        # Not a daemon: Python does not end before the save has.
        self._thread = threading.Thread(target=self._run, args=(save,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save that is under way.

        Raises:
            BaseException: The save's, once.
        """
        self.finish()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Wait, and raise nothing: for who ends because of another error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, save: Callable[[], object]) -> None:
        try:
            save()
        except BaseException as error:
            self._error = error
