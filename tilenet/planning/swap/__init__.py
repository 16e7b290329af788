"""Which layer groups keep, swap or recompute what backward needs."""
