"""All code that knows of ranks and devices."""
