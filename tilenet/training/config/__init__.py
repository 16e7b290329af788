"""The run file: its keys, and how it is read and written."""
