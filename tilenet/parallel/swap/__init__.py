"""Saved activations in host memory or in a file."""
