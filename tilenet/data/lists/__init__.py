"""Lists of images and their labels: by patterns, in a table, or as STAC items."""
