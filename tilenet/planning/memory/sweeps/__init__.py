"""Bytes of maps and training steps that go over an image strip by strip."""
