"""Decisions of a run before its first step, on all ranks alike: network, tiles, swapping."""
