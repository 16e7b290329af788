"""The images of a run: opened, surveyed, partly held out, cut into the work of each rank."""
