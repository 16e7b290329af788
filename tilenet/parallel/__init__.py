"""What knows of ranks and devices."""
