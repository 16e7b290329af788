"""Plans: from network, image and machine to tiles, ranks, partitions and micro-batches."""
