"""Making a map: decisions, tiles by rank, going on with an interrupted one."""
