"""What adoption shows of a list of layers before anybody computes with it."""
