"""Inputs and outputs of encoder-decoder models from text files."""
