"""The files of a run: checkpoints, tables, pictures, locks; each is written atomically."""
