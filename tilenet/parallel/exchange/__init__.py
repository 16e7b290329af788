"""Layers over ranks: halos are exchanged, norms summed."""
