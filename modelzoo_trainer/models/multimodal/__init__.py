"""Decoders that see images."""
