"""Vision transformers: image classes."""
