"""The pixel grid: layers, halos, tiles and their owners, in numbers only."""
