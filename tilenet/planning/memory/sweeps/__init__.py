"""Bytes that a device needs."""
