"""Models of the library `transformers` under names of a configuration."""
