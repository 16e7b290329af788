"""Seconds that a step takes."""
