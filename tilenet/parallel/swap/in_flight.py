"""How many copies out of a device may be under way: one rule of a step and of its plan."""

MOST_IN_FLIGHT = 4  # copies out of a device


def must_wait(count: int, num_bytes: float, most_bytes: float) -> bool:
    """Whether computing waits for the oldest copy out of a device, here and in a planned step.

    Args:
        count: Copies under way.
        num_bytes: Their bytes; the memory of each comes back when it is done.
        most_bytes: Bytes that the plan leaves to them.
    """
    return count > MOST_IN_FLIGHT or num_bytes > most_bytes
