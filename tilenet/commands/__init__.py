"""The command line: one module per command, arguments that several share."""
