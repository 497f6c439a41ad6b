"""Modes: what rows are made of documents."""
