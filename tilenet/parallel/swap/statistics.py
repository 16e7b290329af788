"""Counts of swapped storages and bytes, and the bytes held now."""

from dataclasses import astuple, dataclass, fields

NOW = ("active_bytes", "host_bytes")


@dataclass
class SwapStatistics:
    """Counts since the last reset; bytes held now, and their peaks.

    Attributes:
        active_bytes: Bytes of storages that backward needs and the swapper holds on the device.
        peak_active_bytes: Peak of these, after storages beyond the limit went out.
        out_bytes: Bytes copied out.
        out_count: Storages copied out.
        in_bytes: Bytes copied back.
        in_count: Storages copied back.
        host_bytes: Bytes held in the pool now.
        peak_host_bytes: Peak of these.
        wait_seconds: Seconds in which threads of the program waited for copies; with a device only
            for room, since its own streams wait for one another.
    """

    active_bytes: int = 0
    peak_active_bytes: int = 0
    out_bytes: int = 0
    out_count: int = 0
    in_bytes: int = 0
    in_count: int = 0
    host_bytes: int = 0
    peak_host_bytes: int = 0
    wait_seconds: float = 0.0

    def reset(self) -> None:
        """Begin to count again; bytes that are held now stay counted."""
        for field in fields(self):
            if field.name not in NOW:
                setattr(self, field.name, field.default)
        self.note_peaks()

    def take(self) -> "SwapCounts":
        """Return the counts since the last reset, and reset them.

        Between steps, when no graph lives: so counts of all steps add up to those of the run.
        """
        counts = SwapCounts(*(getattr(self, field.name) for field in fields(SwapCounts)))
        self.reset()
        return counts

    def note_peaks(self) -> None:
        """Raise the peaks to the bytes held now."""
        self.peak_active_bytes = max(self.peak_active_bytes, self.active_bytes)
        self.note_host_peak()

    def note_host_peak(self) -> None:
        """Raise the peak of bytes in the pool to those held now."""
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)


@dataclass(frozen=True)
class SwapCounts:
    """Counts of one or several steps, or of several ranks; see `SwapStatistics`."""

    peak_active_bytes: int = 0
    out_bytes: int = 0
    out_count: int = 0
    in_bytes: int = 0
    in_count: int = 0
    peak_host_bytes: int = 0
    wait_seconds: float = 0.0

    def __add__(self, other: "SwapCounts") -> "SwapCounts":
        """Counts added up, and the larger of both peaks."""
        values = zip(fields(self), astuple(self), astuple(other), strict=True)
        return SwapCounts(
            *(max(a, b) if f.name.startswith("peak") else a + b for f, a, b in values)
        )
