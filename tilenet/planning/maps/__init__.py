"""Choose the way to map an image: in a sweep, in tiles, by exchange of halos, or in passes."""
