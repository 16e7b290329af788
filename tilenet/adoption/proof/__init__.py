"""The checks of a list of layers before it is used."""
