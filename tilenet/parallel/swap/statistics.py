"""What swapping did, and what it holds."""

from dataclasses import astuple, dataclass, fields

__all__ = ["SwapCounts", "SwapStatistics"]

NOW = ("active_bytes", "host_bytes")


@dataclass
class SwapStatistics:
    """Counts since they were reset; bytes now and at most.

    Attributes:
        active_bytes: Bytes of storages that backward needs and the swapper holds on the device.
        peak_active_bytes: Most of them at a time, after what is beyond the limit went out.
        out_bytes: Copied out.
        out_count: Storages copied out.
        in_bytes: Copied back.
        in_count: Storages copied back.
        host_bytes: Held elsewhere now.
        peak_host_bytes: Most of them at a time.
        wait_seconds: That threads of the program waited for copies; on a device only those for
            room, since its own streams wait for one another.
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
        """Begin to count again; what is alive stays counted."""
        for one in fields(self):
            if one.name not in NOW:
                setattr(self, one.name, one.default)
        self.note_peaks()

    def take(self) -> "SwapCounts":
        """What was counted since the last reset, and start over.

        Between steps, when no graph lives: so counts of all steps add up to those of the run.
        """
        counts = SwapCounts(*(getattr(self, one.name) for one in fields(SwapCounts)))
        self.reset()
        return counts

    def note_peaks(self) -> None:
        """Let the peaks be at least what is now."""
        self.peak_active_bytes = max(self.peak_active_bytes, self.active_bytes)
        self.note_host_peak()

    def note_host_peak(self) -> None:
        """Count what is held elsewhere, if it is more than ever before."""
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)


@dataclass(frozen=True)
class SwapCounts:
    """What swapping did in a step, in several, or on several ranks; see `SwapStatistics`."""

    peak_active_bytes: int = 0
    out_bytes: int = 0
    out_count: int = 0
    in_bytes: int = 0
    in_count: int = 0
    peak_host_bytes: int = 0
    wait_seconds: float = 0.0

    def __add__(self, other: "SwapCounts") -> "SwapCounts":
        """Both together: what was counted adds up, of peaks the larger one stays."""
        ours, theirs = astuple(self), astuple(other)
        return SwapCounts(
            *(
                max(a, b) if one.name.startswith("peak") else a + b
                for one, a, b in zip(fields(self), ours, theirs, strict=True)
            )
        )
