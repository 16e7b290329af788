"""Images: the only modules that open rasters."""
