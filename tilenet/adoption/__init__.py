"""Anybody's network: from an `nn.Module` to the flat list of layers that everything reads."""
