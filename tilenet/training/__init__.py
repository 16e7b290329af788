"""A training run: its configuration, its set-up, a step, validation, its folder."""
