"""Encoder-decoder models: T5 and the Transformer."""
