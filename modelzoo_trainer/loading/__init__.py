"""From the user's DataLoader to batches: sample order, position, workers, sharding over ranks."""
