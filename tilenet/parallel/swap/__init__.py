"""Saved activations in host memory, and activation checkpointing."""
