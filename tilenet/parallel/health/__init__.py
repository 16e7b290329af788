"""Whether a job is well: watchdog, signals, trace and progress."""
