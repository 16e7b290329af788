"""How many layers of a partition swap what backward needs."""
