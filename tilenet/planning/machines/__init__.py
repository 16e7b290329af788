"""Machines: nodes, devices, links and how jobs start, from the packaged file and the user's."""
