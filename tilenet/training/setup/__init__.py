"""What a run decides before its first step, on all ranks alike: network, tiles, swapping."""
