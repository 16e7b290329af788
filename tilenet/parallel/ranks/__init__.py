"""The ranks of a job: communicators, devices, start, and what they do together."""
