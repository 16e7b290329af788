"""A run compares its ranks with the user's module before the first step."""
