"""Choose the layers of a partition that swap the tensors that backward needs."""
