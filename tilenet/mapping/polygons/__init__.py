"""Polygons of a class map."""
