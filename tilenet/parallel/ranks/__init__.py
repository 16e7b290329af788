"""The ranks of a job: communicators, devices, start, and work that they do together."""
