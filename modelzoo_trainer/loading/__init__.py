"""Everything between the DataLoader of a user and a batch: order, position, workers, ranks."""
