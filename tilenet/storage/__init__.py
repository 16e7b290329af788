"""What a run leaves: checkpoints, tables, pictures, locks; each file atomic."""
