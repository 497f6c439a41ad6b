"""Weights of our decoders in the layouts of others: Hugging Face and the Cerebras Model Zoo."""
