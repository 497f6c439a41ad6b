"""Rows of tokens from documents: tokenizers, chat templates, and the modes of preprocessing."""
