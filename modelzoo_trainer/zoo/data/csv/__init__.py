"""Samples of encoders in CSV and TSV files."""
