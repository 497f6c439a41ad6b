"""Data processors over datasets of Hugging Face's `datasets` library."""
