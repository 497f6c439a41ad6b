"""Images in folders, and their transforms."""
