"""Which layer groups swap what backward needs."""
