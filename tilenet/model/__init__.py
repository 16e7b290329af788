"""The network in torch, on one device."""
