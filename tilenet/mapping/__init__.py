"""Maps: computing one, writing it, resuming an interrupted one, scoring a finished one."""
