"""Micro-batches over partitions: the door to torchgpipe."""
