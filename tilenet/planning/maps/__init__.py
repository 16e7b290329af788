"""How an image is mapped: in a sweep, in tiles, by exchange of halos, or in passes."""
