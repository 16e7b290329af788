"""The folder of a run: checkpoints, tables, its log, and files on the run itself."""
