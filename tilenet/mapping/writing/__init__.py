"""A map as a file: pieces that all ranks write, and one cloud-optimised GeoTIFF built from them."""
