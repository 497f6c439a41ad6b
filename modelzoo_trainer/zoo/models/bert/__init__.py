"""Encoders: BERT and its heads."""
