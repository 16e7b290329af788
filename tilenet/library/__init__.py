"""What Python programs call; the command line is its first client."""
