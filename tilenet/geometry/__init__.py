"""The pixel grid: layers, halos, tiles and who owns what, in numbers only."""
