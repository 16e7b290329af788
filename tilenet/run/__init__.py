"""A training run: its file, decisions, steps and records."""
