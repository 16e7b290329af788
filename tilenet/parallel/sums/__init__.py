"""Sums over ranks: gradients and values, and what carries them."""
