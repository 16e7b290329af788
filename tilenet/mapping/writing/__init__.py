"""A map as a file: pieces that all ranks write, one cloud-optimised GeoTIFF made of them."""
