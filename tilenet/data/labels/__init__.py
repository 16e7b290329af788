"""Labels: pixels of a raster, or polygons burned block by block."""
