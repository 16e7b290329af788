"""Saves in a thread of their own, at most one at a time, while the run continues."""

import threading
from collections.abc import Callable

from torch import Tensor


class BackgroundSave:
    """Runs saves one after another in a thread; `wait` raises the error of a save."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether the last save failed; `wait` says why."""
        return self._error is not None

    def start(self, save: Callable[[], object]) -> None:
        """Begin a save, once the previous one has ended.

        Raises:
            BaseException: The error of the previous save.
        """
        self.wait()
        # Not a daemon: Python does not end before the save has.
        self._thread = threading.Thread(target=self._run, args=(save,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the current save.

        Raises:
            BaseException: The error of the save; a second call does not raise it again.
        """
        self.finish()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Wait without raising, for a caller that ends because of another error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, save: Callable[[], object]) -> None:
        try:
            save()
        except BaseException as error:
            self._error = error


def in_background(parameter: Tensor) -> bool:
    """Whether a network with this parameter is saved while training goes on."""
    return parameter.device.type != "cpu"


def host_copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the host, which the next step does not change; empties `tensors`."""
    return {name: tensors.pop(name).detach().to("cpu", copy=True) for name in list(tensors)}
