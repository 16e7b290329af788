"""Functions for Python programs; the command line is their first client."""
